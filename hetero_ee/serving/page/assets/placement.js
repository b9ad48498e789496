// The placement map: where each layer's attention and FFN are, and the memory they use on each device.

const PLACES = { gpu: "GPU", cpu: "CPU", stream: "streamed", disk: "disk" };
const SVG = "http://www.w3.org/2000/svg"; // a name; nothing is asked for there
const CELL = 14;

function svg(page, name, attributes, ...children) {
  const made = page.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function bytes(n) {
  if (n >= 2 ** 30) return `${(n / 2 ** 30).toFixed(2)} GiB`;
  return n >= 2 ** 20 ? `${(n / 2 ** 20).toFixed(1)} MiB` : `${(n / 2 ** 10).toFixed(0)} KiB`;
}

function cell(page, part, x, y, width) {
  const title = svg(page, "title", {});
  title.textContent = `${part.name}: ${PLACES[part.placement] ?? part.placement}, ${bytes(part.weight_bytes)}`;
  const box = { x, y, width: width - 2, height: CELL - 2, rx: 2, class: `place ${part.placement}` };
  return svg(page, "rect", box, title);
}

// Parts in rows: attention above FFN, one column per layer; embedding and head at the ends.
function map(page, parts, nLayers) {
  const columns = nLayers + 2;
  const whole = { viewBox: `0 0 ${columns * CELL} ${2 * CELL}`, class: "map", role: "img" };
  const made = svg(page, "svg", whole);
  const rows = new Map();
  for (const part of parts) {
    if (part.layer === null) {
      const isFirst = part.name === "embedding";
      made.append(cell(page, part, isFirst ? 0 : (columns - 1) * CELL, 0, CELL));
      continue;
    }
    const row = rows.get(part.layer) ?? 0;
    rows.set(part.layer, row + 1);
    made.append(cell(page, part, (part.layer + 1) * CELL, row * CELL, CELL));
  }
  return made;
}

// The map in words, for screen readers.
function words(parts) {
  const counts = {};
  for (const { placement } of parts) counts[placement] = (counts[placement] ?? 0) + 1;
  return Object.entries(counts).map(([name, n]) => `${n} ${PLACES[name] ?? name}`).join(", ");
}

export function showPlacement(page, box, { placement, n_layers: nLayers, memory }) {
  const line = (name, text, kind = "") => {
    const made = page.createElement(name);
    made.className = kind;
    made.textContent = text;
    return made;
  };
  box.replaceChildren();
  if (placement) {
    const drawn = map(page, placement.parts, nLayers);
    drawn.setAttribute("aria-label", `Parts of the model by placement: ${words(placement.parts)}`);
    const key = line("p", "", "key");
    for (const name of new Set(placement.parts.map((part) => part.placement))) key.append(line("span", PLACES[name] ?? name, `place ${name}`), " ");
    box.append(drawn, key, line("p", `${placement.hardware}: attention above, FFN below, one column per layer`, "quiet"));
  } else box.append(line("p", `All ${nLayers} layers on the CPU, without a plan.`, "quiet"));
  const rows = Object.entries(memory ?? {}).map(([name, n]) => [`${name}, in use`, n]);
  for (const term of placement?.memory ?? []) rows.push([`${term.name}, planned (${PLACES[term.device] ?? term.device})`, term.n_bytes]);
  const table = page.createElement("table");
  for (const [name, n] of rows) {
    const row = page.createElement("tr");
    row.append(line("th", name), line("td", bytes(n), "right"));
    table.append(row);
  }
  box.append(table);
}
