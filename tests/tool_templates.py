"""Chat templates in the manner of published ones: how they show tools, calls and results."""

ROLES = "{% for m in messages %}<|{{ m.role }}|>\n"
HERMES = (
    "{% if tools %}<|system|>\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'For a call write <tool_call>\n{"name": NAME, "arguments": ARGS}\n</tool_call>\n{% endif %}'
    + ROLES
    + "{{ m.content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}\n{% endfor %}<|assistant|>\n"
)
LLAMA = (
    "{% if tools %}Environment: ipython\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Respond with {"name": function name, "parameters": dictionary}.\n{% endif %}'
    + ROLES
    + "{% if 'tool_calls' in m %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}<|assistant|>\n"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + ROLES
    + "{% if m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}<|assistant|>\n"
)
MISTRAL_ARGS = MISTRAL.replace(
    "{{ call.function | tojson }}", "{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
)
THINKING = HERMES.replace(
    "<|assistant|>\n", "<|assistant|>\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
# Names of its channels and recipients are gpt-oss's; it takes thoughts and content of a call only one at a time.
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>namespace functions {% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}<|end|>{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}"
    "<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
TEMPLATES = {
    "harmony": HARMONY,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral with [ARGS]": MISTRAL_ARGS,
}
