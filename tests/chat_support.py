"""What the tests of conversations share: templates in the styles of well-known models, and one for tiny models."""

from hetero_ee.text.chat_template import Message

LINES = "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"

CHATML = """{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CHATML_WITH_DEFAULT = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are terse.<|im_end|>\n' }}
{%- endif %}
{%- if tools %}{{- raise_exception('no tools here') }}{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set told = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set told = false %}{% endif %}\
{% for message in rest %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}\
{% if loop.index0 == 0 and told %}{% set content = '<<SYS>>\n' + told + '\n<</SYS>>\n\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}\
{% endif %}{% endfor %}"""

LLAMA_3 = """{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role \
+ '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

PHI_3 = """{% for message in messages %}
{% if message.role in ['system', 'user'] %}
{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{% elif message.role == 'assistant' %}
{{ '<|assistant|>\n' + message.content + '<|end|>\n' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}\
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must take turns: user, assistant, user') }}{% endif %}\
{% if message.role == 'user' %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}\
{% elif message.role == 'assistant' %}{{ message.content ~ eos_token }}\
{% else %}{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}{% endfor %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}\
{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}\
{{ '<start_of_turn>' ~ role ~ '\n' ~ message.content | trim ~ '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

VICUNA = """{%- set ns = namespace(first=true) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{{- message.content -}}{%- set ns.first = false -%}{%- continue -%}{%- endif -%}
    {%- if ns.first -%}{{- 'A chat.' -}}{%- set ns.first = false -%}{%- endif -%}
    {{- ' ' ~ {'user': 'USER', 'assistant': 'ASSISTANT'}[message.role] ~ ': ' ~ message.content -}}
    {%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{{- ' ASSISTANT:' -}}"""

WITH_JSON = """{% for message in messages %}{{ message | tojson }}
{{ dict(role=message.role, tags=['<b>', 'é']) | tojson(indent=2) }}
{% endfor %}{{ strftime_now('%Y') | length }}"""

WITH_MACRO = """{% macro say(message) -%}
    <{{ message.role }}>{{ message.content }}</{{ message.role }}>
{%- endmacro %}
{% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
  {{ say(message) }}
{% endfor %}
{{ messages | map(attribute='role') | unique | join(',') }} {{ messages | selectattr('role', 'equalto', 'user') | list \
| length }}"""

WITH_GENERATION = """{% for message in messages %}{% if message.role == 'assistant' %}\
{% generation %}{% set inner = message.content %}{{ inner }}{{ eos_token }}{% endgeneration %}{{ inner is defined }}\
{% else %}{{ message.content }}{% endif %}{% endfor %}"""

STYLES = {
    "chatml": CHATML,
    "chatml-with-default": CHATML_WITH_DEFAULT,
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "phi-3": PHI_3,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
    "vicuna": VICUNA,
    "json": WITH_JSON,
    "macro": WITH_MACRO,
    "generation": WITH_GENERATION,
    "lines": LINES,
}


def text_of(messages: list[Message]) -> str:
    """What LINES makes of messages, without the begin token, which generate() puts there itself."""
    return "".join(f"{message.role}: {message.content}\n" for message in messages) + "assistant:"
