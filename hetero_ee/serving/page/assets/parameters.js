// The form's parameters. An empty field leaves the server's default.

const WHOLE = ["max_tokens", "top_k", "seed"];
const NUMBERS = ["temperature", "top_p", "min_p", "repeat_penalty", ...WHOLE];

// Returns a request's parameters. `temperature` is the default if the form has none.
export function parameters(form, temperature) {
  const found = temperature === undefined ? {} : { temperature };
  for (const name of NUMBERS) {
    const value = form.elements[name].value.trim();
    if (value !== "") found[name] = Number(value);
  }
  const stop = form.elements.stop.value;
  if (stop !== "") found.stop = stop.split(",").map((each) => each.trim());
  return found;
}

// The system message, if there is one.
export function systemMessage(form) {
  const content = form.elements.system.value.trim();
  return content === "" ? [] : [{ role: "system", content }];
}

// Shows what holds where nothing is asked for.
export function showDefaults(form, usual, temperature) {
  for (const name of NUMBERS) {
    const value = name === "temperature" ? temperature : usual[name === "max_tokens" ? "max_new_tokens" : name];
    form.elements[name].placeholder = name === "seed" ? "random" : (value ?? "no limit");
  }
}
