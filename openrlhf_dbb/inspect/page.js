"use strict";
// Draws the page from the JSON in #data. All text goes in as text nodes, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);

const TYPES = { f4: Float32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

function unpack({ type, data: packed }) {
  const raw = atob(packed);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new TYPES[type](bytes.buffer);
}

function unpackAll(columns) {
  const isPacked = (value) => value !== null && typeof value === "object" && "type" in value;
  return Object.fromEntries(Object.entries(columns).map(([name, value]) => [name, isPacked(value) ? unpack(value) : value]));
}

const steps = unpackAll(data.steps), epochs = unpackAll(data.epochs);
const prompts = unpackAll(data.prompts), visits = unpackAll(data.visits);
const STATES = data.states.names;

// ---- small helpers

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)}%`;
const decimal = (value) => Number.isNaN(value) ? "-" : Math.abs(value) >= 1000 ? whole(value) : String(Number(value.toPrecision(3)));
const signed = (value) => Number.isNaN(value) ? "-" : (value > 0 ? "+" : "") + value.toFixed(2);
const fixed = (value) => Number.isNaN(value) ? "-" : value.toFixed(3);
// A prompt in a list: without the beginning that most of them share, such as a chat template's.
function brief(row) {
  const text = prompts.text[row], shared = data.common_prefix;
  return (shared && text.startsWith(shared) ? "\u2026" + text.slice(shared.length) : text).slice(0, 300);
}

const stateClass = (index) => STATES[index].replace(" ", "-");

function swatch(className) {
  return svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" },
    svg("rect", { width: 10, height: 10, rx: 2, class: className }));
}

// Calls draw now and whenever the width of the host changes.
function whenSized(host, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (host.clientWidth === width || !host.clientWidth) return;
    width = host.clientWidth;
    draw(width);
  }).observe(host);
}

function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const gap = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / gap - 1e-9) + 0; i * gap <= high + gap * 1e-6; i++) found.push(i * gap);
  return found;
}

// ---- charts

// chart: title, xLabel, x, lines [{name, y, dots, band}], format, low, high (of y, if fixed).
function lineChart(host, chart) {
  const { x, lines, format } = chart;
  const readout = element("p", { class: "readout", "aria-live": "polite" });
  const drawing = svg("svg", { role: "img", tabindex: "0" });
  const legend = element("ul", { class: "legend" });
  lines.forEach((line, i) => legend.append(element("li", {},
    svg("svg", { viewBox: "0 0 30 10", "aria-hidden": "true" }, line.dots
      ? svg("circle", { cx: 15, cy: 5, r: 4, class: `dot s${i}` })
      : svg("path", { d: "M0 5H30", class: `curve s${i}` })), line.name)));
  const caption = element("figcaption", {}, chart.title);
  host.replaceChildren(caption, ...(lines.length > 1 ? [legend] : []), drawing, readout);
  const describe = (i) => `${chart.xName || chart.xLabel} ${whole(x[i])}: ` + lines.map((line) => `${line.name} ${format(line.y[i])}`).join(", ");
  drawing.setAttribute("aria-label", `${chart.title}. First, ${describe(0)}. Last, ${describe(x.length - 1)}. Arrow keys move along it.`);

  const ys = lines.flatMap((line) => [...line.y, ...(line.band ? [...line.band.low, ...line.band.high] : [])]).filter(Number.isFinite);
  const reduce = (pick, start) => ys.reduce((a, b) => pick(a, b), start);
  let low = chart.low ?? reduce(Math.min, Infinity), high = chart.high ?? reduce(Math.max, -Infinity);
  if (!(high > low)) [low, high] = Number.isFinite(low) ? [low - 0.5, low + 0.5] : [0, 1];
  const first = x[0], last = x[x.length - 1];
  const height = 230;
  let at = x.length - 1, across, cursor;

  function show(i) {
    at = i;
    cursor.setAttribute("d", `M${across(x[i])} 8V${height - 40}`);
    readout.textContent = describe(i);
  }
  function nearest(position) {
    let best = 0;
    for (let i = 1; i < x.length; i++) if (Math.abs(across(x[i]) - position) < Math.abs(across(x[best]) - position)) best = i;
    return best;
  }
  drawing.addEventListener("pointermove", (event) => show(nearest(event.clientX - drawing.getBoundingClientRect().left)));
  drawing.addEventListener("pointerdown", (event) => show(nearest(event.clientX - drawing.getBoundingClientRect().left)));
  drawing.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.max(0, Math.min(x.length - 1, at + move)));
  });

  whenSized(host, (width) => {
    const left = 52, right = width - 12, top = 10, bottom = height - 40;
    across = (value) => last > first ? left + 8 + (value - first) / (last - first) * (right - left - 16) : (left + right) / 2;
    const up = (value) => bottom - (value - low) / (high - low) * (bottom - top);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("height", height);
    const parts = [];
    for (const tick of ticks(low, high, 5)) {
      parts.push(svg("path", { d: `M${left} ${up(tick)}H${right}`, class: "grid" }));
      parts.push(svg("text", { x: left - 7, y: up(tick) + 4, "text-anchor": "end" }, chart.axis ? chart.axis(tick) : decimal(tick)));
    }
    const marks = last > first ? ticks(first, last, Math.max(2, width / 90)).filter(Number.isInteger) : [first];
    for (const tick of marks) {
      parts.push(svg("text", { x: across(tick), y: bottom + 18, "text-anchor": "middle" }, whole(tick)));
    }
    parts.push(svg("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, chart.xLabel));
    lines.forEach((line, i) => {
      if (line.band) {
        const points = [...x.keys()].filter((k) => Number.isFinite(line.band.low[k]));
        const edge = (values, order) => order.map((k) => `${across(x[k])} ${up(values[k])}`).join("L");
        if (points.length > 1) {
          const outline = `M${edge(line.band.high, points)}L${edge(line.band.low, [...points].reverse())}Z`;
          parts.push(svg("path", { d: outline, class: "band" }));
        } else if (points.length) {
          const k = points[0], tall = up(line.band.low[k]) - up(line.band.high[k]);
          parts.push(svg("rect", { x: across(x[k]) - 6, y: up(line.band.high[k]), width: 12, height: tall, class: "band" }));
        }
      }
      if (!line.dots) {
        let path = "", pen = "M";
        for (let k = 0; k < x.length; k++) {
          if (!Number.isFinite(line.y[k])) { pen = "M"; continue; }
          path += `${pen}${across(x[k]).toFixed(1)} ${up(line.y[k]).toFixed(1)}`;
          pen = "L";
        }
        parts.push(svg("path", { d: path, class: `curve s${i}` }));
      }
      if (line.dots || x.length <= 12) {
        for (let k = 0; k < x.length; k++) {
          if (Number.isFinite(line.y[k])) parts.push(svg("circle", { cx: across(x[k]), cy: up(line.y[k]), r: 4, class: `dot s${i}` }));
        }
      }
    });
    cursor = svg("path", { class: "cursor" });
    drawing.replaceChildren(...parts, cursor);
    show(at);
  });
}

function histogram(host, title, counts, tallest) {
  const drawing = svg("svg", { role: "img" });
  const share = (part) => percent(part.reduce((a, b) => a + b, 0) / counts.reduce((a, b) => a + b, 0));
  drawing.setAttribute("aria-label", `${title}: ${share([...counts].slice(0, 2))} below 0.1, ${share([...counts].slice(-2))} above 0.9`);
  host.replaceChildren(element("figcaption", {}, title), drawing);
  const height = 150;
  whenSized(host, (width) => {
    const left = 52, right = width - 8, bottom = height - 24, top = 8;
    const up = (value) => bottom - value / tallest * (bottom - top);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("height", height);
    const parts = [];
    for (const tick of ticks(0, tallest, 3)) {
      parts.push(svg("path", { d: `M${left} ${up(tick)}H${right}`, class: "grid" }));
      parts.push(svg("text", { x: left - 7, y: up(tick) + 4, "text-anchor": "end" }, whole(tick)));
    }
    const bar = (right - left) / counts.length;
    counts.forEach((count, i) => parts.push(
      svg("rect", { x: left + i * bar + 1, y: up(count), width: Math.max(1, bar - 2), height: bottom - up(count), class: "bar" },
        svg("title", {}, `${decimal(i / counts.length)} to ${decimal((i + 1) / counts.length)}: ${whole(count)} prompts`))));
    for (const tick of [0, 0.5, 1]) {
      const anchor = tick === 0 ? "start" : tick === 1 ? "end" : "middle";
      parts.push(svg("text", { x: left + tick * (right - left), y: bottom + 17, "text-anchor": anchor }, String(tick)));
    }
    drawing.replaceChildren(...parts);
  });
}

// At most `most` of 0 ... size - 1, evenly, with the first and the last.
function evenly(size, most) {
  if (size <= most) return [...Array(size).keys()];
  return [...Array(most).keys()].map((i) => Math.round(i * (size - 1) / (most - 1)));
}

function stateBars(host) {
  const shownEpochs = evenly(epochs.epoch.length, 12);
  const drawing = svg("svg", { role: "img", "aria-label": "Prompts in each state after each epoch" });
  host.replaceChildren(element("figcaption", {}, "Share of prompts after each epoch"), drawing);
  whenSized(host, (width) => {
    const left = 74, right = width - 8, row = 30;
    const parts = shownEpochs.flatMap((e, k) => {
      let x = left;
      const made = [svg("text", { x: left - 8, y: k * row + 20, "text-anchor": "end" }, `epoch ${whole(epochs.epoch[e])}`)];
      for (let s = 0; s < 4; s++) {
        const count = epochs.states[e * 4 + s], wide = count / epochs.prompts[e] * (right - left);
        made.push(svg("rect", { x, y: k * row + 4, width: Math.max(0, wide - 1), height: row - 8, class: stateClass(s) },
          svg("title", {}, `${STATES[s]}: ${whole(count)} of ${whole(epochs.prompts[e])} prompts`)));
        x += wide;
      }
      return made;
    });
    const height = shownEpochs.length * row + 26;
    for (const tick of [0, 0.5, 1]) {
      const anchor = tick === 0 ? "start" : tick === 1 ? "end" : "middle";
      parts.push(svg("text", { x: left + tick * (right - left), y: height - 6, "text-anchor": anchor }, `${100 * tick}%`));
    }
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("height", height);
    drawing.replaceChildren(...parts);
  });
}

// ---- sections

const fact = Object.fromEntries(data.facts);

function drawHead() {
  byId("name").textContent = document.title;
  byId("subtitle").textContent = [fact.estimator, fact.model, fact["data set"], fact.status].join(" \u00b7 ");
  const size = epochs.epoch.length;
  const numbers = [["prompts", whole(data.all_prompts)], ["groups of rollouts", whole(steps.groups)]];
  if (size) {
    numbers.push([`success rate, epoch ${whole(epochs.epoch[0])}`, percent(epochs.success_rate[0])]);
    if (size > 1) numbers.push([`success rate, epoch ${whole(epochs.epoch[size - 1])}`, percent(epochs.success_rate[size - 1])]);
    numbers.push(["zero-variance groups", percent(steps.zero_variance_groups / steps.groups)]);
    if (steps.zero_variance_groups) numbers.push(["of these rescued", percent(steps.rescued_groups / steps.zero_variance_groups)]);
  }
  byId("numbers").append(...numbers.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function drawCurves() {
  byId("pruned").hidden = steps.first <= 1;
  byId("pruned").textContent = `The history before step ${whole(steps.first)} is no longer in the store; this page is of what is kept.`;
  const span = steps.span > 1 ? `step (each point: ${whole(steps.span)} steps)` : "step";
  const rates = data.unit ? { low: 0, high: 1 } : {};
  const share = { format: percent, axis: (value) => `${Math.round(100 * value)}%`, low: 0, high: 1 };
  const reward = data.unit ? { ...share } : { format: decimal };
  const draw = (id, title, x, xLabel, xName, style, lines) => lineChart(byId(id), { title, x, xLabel, xName, ...style, lines });
  const curves = (of) => [{ name: "success rate", y: of.success_rate }, { name: "posterior mean", y: of.mean }];
  const flat = (of) => [{ name: "zero variance", y: of.zero_variance }, { name: "rescued", y: of.rescued }];
  draw("by-step", "By step", steps.step, span, "step", { ...reward, ...rates }, curves(steps));
  draw("by-epoch", "By epoch", epochs.epoch, "epoch", "epoch", { ...reward, ...rates }, curves(epochs));
  draw("flat-by-step", "Share of the groups, by step", steps.step, span, "step", share, flat(steps));
  draw("flat-by-epoch", "Share of the groups, by epoch", epochs.epoch, "epoch", "epoch", share, flat(epochs));
  byId("groups-note").textContent =
    "A group is zero-variance if all its rewards are 0 or all are 1: its own mean and deviation give no advantage. It is " +
    "rescued if the variance it was scored with is above 0 nevertheless. " +
    `Here ${whole(steps.zero_variance_groups)} of ${whole(steps.groups)} groups, ${whole(steps.rescued_groups)} rescued.`;
  const bins = epochs.bins;
  const chosen = evenly(epochs.epoch.length, 6);
  const counts = chosen.map((e) => epochs.histogram.subarray(e * bins, (e + 1) * bins));
  const tallest = Math.max(...counts.map((values) => Math.max(...values)));
  byId("histograms").append(...chosen.map((e, i) => {
    const host = element("figure");
    histogram(host, `Epoch ${whole(epochs.epoch[e])} \u00b7 ${whole(epochs.prompts[e])} prompts`, counts[i], tallest);
    return host;
  }));
  if (data.probes) {
    const probes = unpackAll(data.probes);
    byId("probes").hidden = false;
    byId("probes-note").textContent =
      `Mean squared error of the estimates, in squared reward, against ${whole(probes.samples)} extra rollouts of ` +
      `${whole(probes.groups)} groups that were never trained on, less these rollouts' own noise; below 0 is chance.`;
    lineChart(byId("probe-errors"), { title: "Mean squared error", x: probes.step, xLabel: "step", format: decimal,
      low: Math.min(0, ...probes.estimate, ...probes.group),
      lines: [{ name: "stored estimate", y: probes.estimate }, { name: "group's own mean S / N", y: probes.group }] });
  }
  byId("shared").hidden = !data.shared.length;
  byId("shared-charts").append(...data.shared.map((series) => {
    const host = element("figure");
    lineChart(host, { title: series.name, x: unpack(series.step), xLabel: "step", format: decimal, lines: [{ name: series.name, y: unpack(series.value) }] });
    return host;
  }));
}

function drawStates() {
  const { mastered, forgotten, impossible } = data.states;
  const meanings = [
    `posterior mean of ${mastered} or more after the last visit.`,
    "none of the others: solved at times.",
    `posterior mean at least ${forgotten} below the highest it had after an earlier visit.`,
    `not one success so far, and a posterior mean of ${impossible} or less.`,
    "known from the warm start alone, or its visits are no longer in the store.",
  ];
  STATES.forEach((name, s) => {
    const count = data.state_counts[s];
    if (s === 4 && !count) return;
    byId("definitions").append(element("div", {}, swatch(stateClass(s)),
      element("dt", {}, `${name}: ${whole(count)} (${percent(count / Math.max(1, data.all_prompts))}) `,
        element("button", { type: "button", class: "link", onclick: () => filterBy(s), "aria-label": `List the prompts of state ${name}` }, "list them")),
      element("dd", {}, meanings[s])));
  });
  if (!data.unit) byId("definitions").append(element("p", { class: "note" }, "These thresholds are meant for rewards in [0, 1]; this run has others."));
  if (epochs.epoch.length) stateBars(byId("state-bars"));
}

function drawMovers() {
  const rowOf = new Map(Array.from(prompts.id, (id, row) => [id, row]));
  for (const list of ["improved", "regressed"]) {
    byId(list).append(...data[list].map((id) => {
      const row = rowOf.get(id), last = prompts.mean[row];
      const figures = `${(last - prompts.change[row]).toFixed(2)} \u2192 ${last.toFixed(2)} (${signed(prompts.change[row])})`;
      return element("li", {}, element("button", { type: "button", onclick: () => openPrompt(row) },
        element("span", { class: "figures" }, figures), element("span", { class: "text", dir: "auto" }, brief(row))));
    }));
    if (!data[list].length) byId(list).append(element("li", { class: "note" }, "None yet: no prompt has changed so."));
  }
}

function drawRun() {
  const pairs = (list) => list.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  byId("facts").append(...pairs(data.facts));
  byId("config").append(...pairs(data.config));
  byId("lineage").append(...data.lineage.map(([relation, name, text]) => element("li", {}, `${relation}: `, element("strong", {}, name), ` (${text})`)));
  byId("events").append(...data.events.map(([when, kind, from, to]) =>
    element("li", {}, `${when} ${kind.replaceAll("_", " ")}, ` + (from === to ? `at step ${whole(to)}` : `from step ${whole(from)} to ${whole(to)}`))));
  if (!data.events.length) byId("events").append(element("li", {}, "None."));
}

// ---- the table of prompts

const PER_PAGE = 25;
const COLUMNS = [
  { name: "number", key: (row) => prompts.id[row] },
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
    return element("th", { scope: "col", "aria-sort": sorted, class: column.optional ? "optional" : column.name },
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
    ? `The table holds ${whole(prompts.id.length)} of ${whole(data.all_prompts)} prompts, evenly chosen. ` : "";
  byId("prompts-note").textContent = `${most}Choose a number to see that prompt's history; choose a heading to sort. Change: from the first visit in the record to the last.`;
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

function openPrompt(row) {
  const part = Object.fromEntries(Object.entries(visits).map(([name, values]) => [name, values.slice(begins[row], begins[row + 1])]));
  const rate = Float32Array.from(part.successes, (value, i) => value / part.rollouts[i]);
  byId("prompt-title").textContent = `Prompt ${prompts.id[row]}`;
  byId("prompt-facts").textContent = `${STATES[prompts.state[row]]}, posterior mean ${fixed(prompts.mean[row])}, ${whole(prompts.visits[row])} visits`;
  byId("prompt-text").textContent = prompts.text[row] + (prompts.cut[row] ? ` \u2026 (${whole(prompts.cut[row])} characters in all)` : "");
  byId("prompt-label").textContent = prompts.label[row];
  const table = byId("prompt-visits");
  byId("prompt").showModal(); // first: what is hidden has no width to draw for
  byId("prompt").scrollTop = 0;
  byId("prompt-chart").replaceChildren();
  table.tHead.replaceChildren();
  table.tBodies[0].replaceChildren();
  const level = Math.round(100 * data.level);
  byId("prompt-note").textContent = !part.step.length ? "No visit of it is in the store." : data.beta
    ? `Band: central ${level}% credible interval of Beta(alpha, beta). Circles: successes over rollouts of each visit.`
    : `Band: mean \u00b1 1.645 \u221a(variance / N), ${level}% if rewards were normal: this estimator keeps no alpha and beta. Circles: successes over rollouts.`;
  if (!part.step.length) return;
  lineChart(byId("prompt-chart"), { title: "Posterior mean after each visit", x: part.step, xLabel: "step", format: fixed,
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

drawHead();
if (steps.groups) drawCurves();
if (!data.unit) byId("means").hidden = true; // its bins are of [0, 1]
if (!steps.groups) for (const id of ["curves", "means", "groups", "movers"]) byId(id).hidden = true;
drawStates();
drawMovers();
drawRun();
setUpTable();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
