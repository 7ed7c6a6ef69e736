// ---- the table of prompts

const PER_PAGE = 25;
const COLUMNS = [
  { name: "prompt id", key: (row) => prompts.id[row] },
  { name: "state", key: (row) => prompts.state[row] },
  { name: "mean", key: (row) => prompts.mean[row] },
  { name: "change", key: (row) => prompts.change[row] },
  { name: "visits", key: (row) => prompts.visits[row], optional: true },
  { name: "text", key: (row) => prompts.text[row] },
];
const view = { sort: 0, down: false, page: 0, rows: [] };
let searchable = null;

function select() {
  const wanted = byId("search").value.trim().toLowerCase(), state = byId("state").value;
  searchable ??= prompts.text.map((text, row) => `${prompts.id[row]}\n${text}\n${prompts.label[row]}`.toLowerCase());
  view.rows = [...prompts.id.keys()].filter((row) =>
    (state === "" || prompts.state[row] === Number(state)) && (wanted === "" || searchable[row].includes(wanted)));
  order();
}

function order() {
  const { key } = COLUMNS[view.sort], sign = view.down ? -1 : 1;
  const keys = new Map(view.rows.map((row) => [row, key(row)]));
  const missing = (value) => Number.isNaN(value);
  view.rows.sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y) || a - b;
    return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b;
  });
  view.page = 0;
  drawTable();
}

function drawTable() {
  const pages = Math.max(1, Math.ceil(view.rows.length / PER_PAGE)), start = view.page * PER_PAGE;
  byId("table").tHead.rows[0].replaceChildren(...COLUMNS.map((column, i) => {
    const sorted = view.sort === i ? (view.down ? "descending" : "ascending") : "none";
    const arrow = view.sort !== i ? "" : view.down ? " \u25bc" : " \u25b2";
    const sort = () => {
      view.down = view.sort === i ? !view.down : ["mean", "change", "visits"].includes(column.name);
      view.sort = i;
      order();
      byId("table").tHead.rows[0].cells[i].firstChild.focus();
    };
    return element("th", { scope: "col", "aria-sort": sorted, class: column.optional ? "optional" : column.name.replace(" ", "-") },
      element("button", { type: "button", onclick: sort }, column.name + arrow));
  }));
  byId("table").tBodies[0].replaceChildren(...view.rows.slice(start, start + PER_PAGE).map((row) => element("tr", {},
    element("td", {}, element("button", { type: "button", onclick: () => openPrompt(row), "aria-label": `Prompt ${prompts.id[row]}: its history` }, String(prompts.id[row]))),
    element("td", { class: "state" }, swatch(stateClass(prompts.state[row])), STATES[prompts.state[row]]),
    element("td", {}, fixed(prompts.mean[row])),
    element("td", {}, signed(prompts.change[row])),
    element("td", { class: "optional" }, whole(prompts.visits[row])),
    element("td", {}, element("div", { class: "text", dir: "auto" }, brief(row))))));
  byId("hits").textContent = `${whole(view.rows.length)} of ${whole(prompts.id.length)} prompts`;
  byId("page").textContent = `page ${whole(view.page + 1)} of ${whole(pages)}`;
  byId("previous").disabled = view.page === 0;
  byId("next").disabled = view.page >= pages - 1;
}

function filterBy(state) {
  byId("search").value = "";
  byId("state").value = String(state);
  select();
  byId("prompts").scrollIntoView();
  byId("state").focus({ preventScroll: true });
}

function setUpTable() {
  const most = prompts.id.length < data.all_prompts
    ? `The table holds ${whole(prompts.id.length)} of ${whole(data.all_prompts)} prompts, evenly spaced. ` : "";
  byId("prompts-note").textContent = `${most}Choose a prompt id to see its history; choose a heading to sort. Change: from the first recorded visit to the last.`;
  STATES.forEach((name, s) => byId("state").append(element("option", { value: String(s) }, name)));
  byId("search").addEventListener("input", select);
  byId("state").addEventListener("change", select);
  byId("filter").addEventListener("submit", (event) => event.preventDefault());
  const turn = (by) => () => { view.page += by; drawTable(); };
  byId("previous").addEventListener("click", turn(-1));
  byId("next").addEventListener("click", turn(1));
  select();
}

// ---- one prompt

const begins = new Uint32Array(prompts.id.length + 1);
prompts.count.forEach((count, row) => { begins[row + 1] = begins[row] + count; });

// What became of the prompt's rollouts in the steps whose history is in the store; "" if usage was not recorded.
function usageOf(row) {
  if (!data.usage || !steps.groups) return "";
  const { generated, trained, skipped, replayed } = prompts;
  const since = steps.first > 1 ? ` since step ${whole(steps.first)}` : "";
  return `. Rollouts${since}: ${whole(generated[row])} generated, ${whole(trained[row])} trained on, ${whole(generated[row] - trained[row])} filtered out` +
    (replayed[row] ? `, ${whole(replayed[row])} replayed` : "") + (skipped[row] ? `; skipped ${whole(skipped[row])} times` : "");
}

function openPrompt(row) {
  const part = Object.fromEntries(Object.entries(visits).map(([name, values]) => [name, values.slice(begins[row], begins[row + 1])]));
  const rate = Float32Array.from(part.successes, (value, i) => value / part.rollouts[i]);
  byId("prompt-title").textContent = `Prompt ${prompts.id[row]}`;
  byId("prompt-facts").textContent = `${STATES[prompts.state[row]]}, posterior mean ${fixed(prompts.mean[row])}, ${whole(prompts.visits[row])} visits${usageOf(row)}`;
  byId("prompt-text").textContent = prompts.text[row] + (prompts.cut[row] ? ` \u2026 (${whole(prompts.cut[row])} characters in all)` : "");
  byId("prompt-label").textContent = prompts.label[row];
  const table = byId("prompt-visits");
  byId("prompt").showModal(); // first: what is hidden has no width to draw for
  byId("prompt").scrollTop = 0;
  byId("prompt-chart").replaceChildren();
  table.tHead.replaceChildren();
  table.tBodies[0].replaceChildren();
  const level = Math.round(100 * data.level);
  byId("prompt-note").textContent = !part.step.length ? "None of its visits is in the store." : data.beta
    ? `Band: central ${level}% credible interval of Beta(alpha, beta). Circles: successes over rollouts of each visit.`
    : `Band: mean \u00b1 1.645 \u221a(variance / N), ${level}% if rewards were normal: this estimator keeps no alpha and beta. Circles: successes over rollouts.`;
  if (!part.step.length) return;
  lineChart(byId("prompt-chart"), { title: "Posterior mean after each visit", ...axisOf(part.step), format: fixed,
    ...(data.unit && data.beta ? { low: 0, high: 1 } : {}),
    lines: [{ name: "posterior mean", y: part.mean, band: part }, { name: "successes / rollouts", y: rate, dots: true }] });
  const header = ["step", "rollouts", "successes", ...(data.beta ? ["alpha", "beta"] : []), "mean", `${level}% from`, "to"];
  table.tHead.append(element("tr", {}, ...header.map((name) => element("th", { scope: "col" }, name))));
  part.step.forEach((step, i) => table.tBodies[0].append(element("tr", {}, ...[
    whole(step), whole(part.rollouts[i]), decimal(part.successes[i]),
    ...(data.beta ? [decimal(part.alpha[i]), decimal(part.beta[i])] : []),
    fixed(part.mean[i]), fixed(part.low[i]), fixed(part.high[i]),
  ].map((text) => element("td", {}, text)))));
}

byId("prompt").addEventListener("click", (event) => { if (event.target === byId("prompt")) byId("prompt").close(); });
