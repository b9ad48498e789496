// The box of a token: its origin and its likeliest alternatives.
import { originOf } from "/page/tokens.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const shown = (text) => text.replaceAll("\n", "⏎").replaceAll(" ", "·") || "(nothing yet)";

export class Candidates {
  // box: the floating element.
  constructor(page, box) {
    [this.page, this.box, this.span] = [page, box, null];
  }

  show(span, token, nLayers) {
    this.hide();
    this.span = span;
    span.classList.add("chosen");
    const line = (name, ...cells) => {
      const made = this.page.createElement(name);
      made.append(...cells);
      return made;
    };
    const drafted = token.n_drafted ? `, ${token.step_index + 1} of a step with ${token.n_drafted} drafts` : "";
    const where = `${originOf(token.origin).word}, after ${token.depth} of ${nLayers} layers${drafted}`;
    const rows = token.top.map((each) => {
      const row = line("tr", line("td", shown(each.token)), line("td", percent(each.logprob)));
      if (each.token === token.name) row.className = "taken";
      return row;
    });
    const chance = token.logprob === null ? "" : ` ${percent(token.logprob)}`;
    this.box.replaceChildren(line("strong", shown(token.name) + chance), line("p", where));
    if (rows.length) this.box.append(line("table", line("tbody", ...rows)));
    this.box.hidden = false;
    this.place(span);
  }

  hide() {
    this.span?.classList.remove("chosen");
    this.span = null;
    this.box.hidden = true;
  }

  place(span) {
    const [at, own] = [span.getClientRects()[0] ?? span.getBoundingClientRect(), this.box.getBoundingClientRect()];
    const below = at.bottom + 6 + own.height < innerHeight;
    this.box.style.top = `${below ? at.bottom + 6 : Math.max(6, at.top - own.height - 6)}px`;
    this.box.style.left = `${Math.max(6, Math.min(at.left, innerWidth - own.width - 6))}px`;
  }
}
