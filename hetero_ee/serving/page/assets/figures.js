// Figures of a reply while it arrives: measured and expected speed, acceptance, depths, origins.
import { originOf } from "/page/tokens.js";

const WINDOW_MS = 2000; // of the current speed

export class Figures {
  constructor(page, at) {
    [this.page, this.at, this.nLayers] = [page, at, 0];
    [this.expected, this.isEmulated] = [null, false]; // an emulated machine's seconds are not this one's
    this.begin();
  }

  begin() {
    [this.times, this.tokens] = [[], []];
    this.at("speed").textContent = "–";
    this.show();
  }

  // A token or several have come.
  add(tokens, nowMs = performance.now()) {
    this.tokens = tokens;
    this.times.push([nowMs, tokens.length]);
    while (this.times.length > 2 && nowMs - this.times[0][0] > WINDOW_MS) this.times.shift();
    const [firstMs, before] = this.times[0];
    if (nowMs > firstMs) this.speed((1000 * (tokens.length - before)) / (nowMs - firstMs));
    this.show();
  }

  speed(tokensPerS) {
    const where = this.isEmulated ? "expected on the emulated machine" : "expected";
    this.at("speed").textContent = `${tokensPerS.toFixed(1)} tokens/s`;
    this.at("expected").textContent = this.expected === null ? "no prediction" : `${this.expected.toFixed(1)} ${where}`;
    const meter = this.at("meter");
    meter.hidden = this.expected === null || this.isEmulated;
    meter.max = 2 * (this.expected ?? 1);
    meter.value = tokensPerS;
  }

  show() {
    const drafted = this.tokens.reduce((n, each) => n + (each.step_index === 0 ? each.n_drafted : 0), 0);
    const right = this.tokens.filter((each) => each.n_drafted && each.origin !== "full").length;
    this.at("acceptance").textContent = drafted ? `${right} of ${drafted} drafts accepted, ${Math.round((100 * right) / drafted)} %` : "no drafts";
    this.bars("origins", counted(this.tokens.map((each) => each.origin)), (name) => originOf(name));
    const depths = counted(this.tokens.map((each) => each.depth));
    this.bars("depths", new Map([...depths].sort(([a], [b]) => a - b)), (depth) => ({
      word: `${depth} of ${this.nLayers} layers`,
      mark: depth === this.nLayers ? "full" : "exit",
    }));
    const sum = this.tokens.reduce((n, each) => n + each.depth, 0);
    this.at("depth").textContent = this.tokens.length ? `${(sum / this.tokens.length).toFixed(1)} layers per token on average` : "";
  }

  // A row a value, as long as its share.
  bars(id, counts, named) {
    const rows = [...counts].map(([value, n]) => {
      const { word, mark } = named(value);
      const row = this.page.createElement("tr");
      const [name, share, bar] = ["th", "td", "div"].map((each) => this.page.createElement(each));
      name.textContent = word;
      name.className = `token ${mark}`;
      bar.className = `bar ${mark}`;
      bar.style.width = `${(100 * n) / this.tokens.length}%`;
      bar.textContent = String(n);
      share.append(bar);
      row.append(name, share);
      return row;
    });
    this.at(id).replaceChildren(...rows);
  }
}

function counted(values) {
  const found = new Map();
  for (const value of values) found.set(value, (found.get(value) ?? 0) + 1);
  return found;
}
