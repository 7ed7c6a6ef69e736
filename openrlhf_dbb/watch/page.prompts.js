// ---- the table of prompts

const MOST_PROMPTS = 100; // drawn at a time; sorting, search and filter reach the others
const FALLING = ["mean", "change", "visits"]; // sorted downwards at first
const COLUMNS = ["id", "state", "mean", "change", "visits", "text"];
const sortedBy = () => COLUMNS.includes(at.sort) ? at.sort : "id";

// Returns a column whose heading sorts by it.
function sorting(name, column) {
  const turn = () => go({ sort: name, down: (sortedBy() === name ? at.down !== "1" : FALLING.includes(name)) ? "1" : null });
  return { name, left: ["state", "text"].includes(name), ...column, head: () => element("button", { type: "button", onclick: turn }), updateHead(cell) {
    const down = at.down === "1", isSorted = sortedBy() === name;
    setAttributes(cell, { "aria-sort": !isSorted ? "none" : down ? "descending" : "ascending" });
    setText(cell.firstChild, name + (!isSorted ? "" : down ? " \u25bc" : " \u25b2"));
  } };
}

// Returns the columns of a table whose rows are places in the answer's columns.
function promptColumns({ unit, columns: { id, state, mean, change, visits, text } }) {
  return [
    sorting("id", { make: () => element("a"), update(link, row) {
      setAttributes(link, { href: addressWith({ prompt: id[row], visit: null }), "aria-label": `Prompt ${id[row]}: its history` });
      return String(id[row]);
    } }),
    ...(!unit ? [] : [sorting("state", { make: () => element("span", {}, swatch(""), element("span")), update(node, row) {
      const name = STATE_NAMES[state[row]];
      setAttributes(node.firstChild.firstChild, { class: stateClass(name) });
      setText(node.lastChild, ` ${name}`);
    } })]),
    sorting("mean", { update: (_, row) => fixed(mean[row]) }),
    sorting("change", { update: (_, row) => signed(change[row]) }),
    sorting("visits", { update: (_, row) => whole(visits[row]) }),
    sorting("text", { make: () => element("div", { class: "text", dir: "auto" }), update: (_, row) => brief(text[row], theRun()) }),
  ];
}

const tablePath = (run) => `runs/${run.id}/prompts`;

function selectedRows(answer) {
  const { columns } = answer, wanted = (at.q ?? "").trim().toLowerCase(), state = chosenState(answer);
  const rows = [];
  for (let row = 0; row < columns.id.length; row++) {
    if (state !== null && columns.state[row] !== state) continue;
    const text = `${columns.id[row]}\n${columns.text[row]}\n${columns.label[row] ?? ""}`;
    if (wanted && !text.toLowerCase().includes(wanted)) continue;
    rows.push(row);
  }
  const keys = columns[sortedBy()], sign = at.down === "1" ? -1 : 1;
  return rows.sort((a, b) => {
    const x = keys[a], y = keys[b];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b;
  });
}

VIEWS.prompts = {
  ofOneRun: true,
  needs: () => [need(tablePath(theRun()), theRun().version)].filter(Boolean),
  draw() {
    const answer = got(tablePath(theRun()));
    if (!answer) return 0;
    const { columns } = answer, rows = selectedRows(answer);
    setText(byId("prompts-note"), !columns.id.length ? "This run has no prompts yet."
      : "Choose a prompt to see its history and its responses; choose a heading to sort."
      + ` Mean: ${theRun().mean_name}. Change: of the mean, from the first visit to the last.${answer.unit ? "" : ` ${NO_STATES}`}`);
    byId("state").parentElement.hidden = !answer.unit;
    byId("prompts").classList.toggle("no-states", !answer.unit);
    setValue(byId("search"), at.q ?? "");
    setValue(byId("state"), at.state ?? "");
    setText(byId("hits"), `${whole(rows.length)} of ${plural(columns.id.length, "prompt")}${rows.length > MOST_PROMPTS ? `; the first ${MOST_PROMPTS} are shown` : ""}`);
    drawTable(byId("prompts"), promptColumns(answer), rows.slice(0, MOST_PROMPTS), (row) => columns.id[row]);
    return answer.last ?? 0;
  },
};

// ---- one prompt: its posterior after each visit, and the responses of a visit

const promptPath = () => `runs/${theRun().id}/prompts/${encodeURIComponent(at.prompt)}`;

// Returns the chosen visit: the nearest to the one in the address, or the last visit with kept rollouts.
function chosenVisit(visits) {
  const size = visits.step.length, wanted = numberIn("visit");
  if (!size) return -1;
  if (wanted !== null) return nearest(visits.step, wanted);
  const there = source.steps(theRun().id), kept = visits.kept?.findLastIndex((count, i) => count > 0 && (!there || there.includes(visits.step[i]))) ?? -1;
  return kept < 0 ? size - 1 : kept;
}
const responsesPath = (step) => `runs/${theRun().id}/rollouts/${step}/${encodeURIComponent(at.prompt)}`;
const choose = (step) => go({ visit: step }, { replace: true });

const PROMPT = {
  shown: null, // the prompt that is or was open
  needs() {
    if (at.prompt === undefined || !theRun()) return [];
    const needed = [need(promptPath(), theRun().version)], answer = got(promptPath());
    const visit = answer ? chosenVisit(answer.visits) : -1;
    if (visit >= 0 && answer.visits.kept?.[visit] !== 0) needed.push(need(responsesPath(answer.visits.step[visit]), "kept"));
    return needed.filter(Boolean);
  },
  draw() {
    const dialog = byId("prompt"), open = at.prompt !== undefined && Boolean(theRun());
    this.shown = at.prompt ?? this.shown;
    dialog.dataset.from = at.view;
    for (const [id, way] of [["earlier-group", -1], ["later-group", 1]]) {
      byId(id).hidden = groupBeside(-1) === null && groupBeside(1) === null;
      byId(id).disabled = groupBeside(way) === null;
    }
    if (!open) {
      if (dialog.open) dialog.close();
      return;
    }
    const entry = answers.get(promptPath()), answer = entry?.answer;
    setText(byId("prompt-title"), `Prompt ${at.prompt}`);
    if (!dialog.open) {
      dialog.showModal();
      dialog.scrollTop = 0;
    }
    for (const part of dialog.querySelectorAll(".beside > div")) part.hidden = !answer;
    setText(byId("prompt-note"), answer ? "" : entry?.error ? `The history of this prompt cannot be shown: ${entry.error}` : "Loading \u2026");
    if (!answer) return setText(byId("prompt-facts"), "");
    setText(byId("prompt-facts"), `${answer.state === null ? "" : `${STATE_NAMES[answer.state]}, `}${theRun().mean_name} ${fixed(answer.mean)}, ${plural(answer.visits.step.length, "visit")}`);
    drawOnce(byId("prompt-text"), `${theRun().id} ${at.prompt}`, () => {
      byId("prompt-text").replaceChildren(textBox(answer.text, "Prompt"));
      byId("label-title").hidden = !answer.label;
      byId("prompt-label").replaceChildren(...answer.label ? [textBox(answer.label, "Label")] : []);
    });
    const visit = chosenVisit(answer.visits), beta = Boolean(answer.visits.alpha?.some(isNumber));
    for (const id of ["prompt-chart", "visits-box"]) byId(id).hidden = visit < 0;
    const band = beta ? `central 90\u00a0% credible interval of Beta(alpha, beta)`
      : `mean \u00b1 1.645 \u221a(variance / N), 90\u00a0% if rewards were normal: this estimator keeps no alpha and beta`;
    setText(byId("prompt-note"), visit < 0 ? "It was not visited in this run."
      : `${MEANINGS[theRun().mean_name]} Band: ${band}. Circles: successes over rollouts of each visit. Choose a visit to read its responses.`);
    if (visit >= 0) drawVisits(answer.visits, visit, beta);
    drawResponses(answer.visits, visit);
  },
};

function drawVisits(visits, visit, beta) {
  const rates = visits.step.map((_, i) => visits.rollouts[i] ? visits.successes[i] / visits.rollouts[i] : null);
  const all = [...visits.low, ...visits.high, ...rates].filter(isNumber), unit = all.every((value) => value >= 0 && value <= 1);
  const meanName = theRun().mean_name, lagAt = (step) => visits.lag[visits.step.indexOf(step)];
  chartOf(byId("prompt-chart"), { onPick: choose }).update({
    ...AXES.steps, nameOf: (x) => `step ${whole(x)}${lagAt(x) ? `, lag ${decimal(lagAt(x))}` : ""}`, title: `${meanName[0].toUpperCase()}${meanName.slice(1)} after each visit`, yText: fixed, ...(unit ? { low: 0, high: 1 } : {}),
    lines: [{ name: meanName, slot: 0, x: visits.step, y: visits.mean, low: visits.low, high: visits.high },
      { name: "successes / rollouts", slot: 1, x: visits.step, y: rates, dots: true }],
    legend: [[lineMark(0), meanName], [dotMark(1), "successes / rollouts"]], marked: visits.step[visit] });
  const numbers = [["rollouts", visits.rollouts, whole], ["successes", visits.successes, decimal],
    ...(beta ? [["alpha", visits.alpha, decimal], ["beta", visits.beta, decimal]] : []),
    ["mean", visits.mean, fixed], ["90\u00a0% from", visits.low, fixed], ["to", visits.high, fixed],
    ...(visits.lag.some(Boolean) ? [["lag", visits.lag, decimal]] : []), ["kept", visits.kept ?? [], whole]];
  const step = { name: "step", make: () => element("button", { type: "button" }), update(button, i) {
    button.onclick = () => choose(visits.step[i]);
    setAttributes(button.closest("tr"), { "aria-current": i === visit ? "true" : null });
    setAttributes(button, { "aria-label": `Step ${whole(visits.step[i])}: show its responses` });
    return whole(visits.step[i]);
  } };
  const columns = [step, ...numbers.map(([name, values, format]) => ({ name, update: (_, i) => format(values[i]) }))];
  drawTable(byId("visits"), columns, [...visits.step.keys()], (i) => `${at.prompt} ${visits.step[i]}`);
}

function drawResponses(visits, visit) {
  const step = visits.step[visit], kept = visits.kept?.[visit], entry = visit < 0 ? null : answers.get(responsesPath(step));
  const found = (entry?.answer?.rollouts ?? []).filter((rollout) => String(rollout.prompt_id) === at.prompt);
  setText(byId("responses-title"), visit < 0 ? "Responses" : `Responses in step ${whole(step)}`);
  const partly = found.length < visits.rollouts[visit] ? `; ${whole(found.length)} of ${whole(visits.rollouts[visit])} rollouts were kept` : "";
  const note = found.length ? `${tally(found)}${partly}.` : !theRun().keeps_rollouts ? "This run kept no responses."
    : kept === 0 || entry?.answer ? "The rollouts of this visit were not kept."
    : entry?.error ? `The rollouts of this visit cannot be shown: ${entry.error}` : "Loading \u2026";
  setText(byId("responses-note"), visit < 0 ? "" : note);
  const form = entry?.answer?.form ?? null, group = entry?.answer?.prompts[at.prompt]?.group;
  drawOnce(byId("responses"), `${theRun().id} ${at.prompt} ${step} ${found.length}`, () => {
    byId("responses").replaceChildren(...found.length ? [sides(found, form)] : []);
    byId("group-facts").replaceChildren(...found.length ? [badge(groupKindOf(found, group, form)), ` ${group ? expectation(group) : ""}`] : []);
  });
}

function setUpPrompts() {
  byId("state").append(element("option", { value: "" }, "any"), ...STATE_NAMES.map((name, s) => element("option", { value: String(s) }, name)));
  byId("search").addEventListener("input", (event) => go({ q: event.target.value || null }, { replace: true }));
  byId("state").addEventListener("change", (event) => go({ state: event.target.value || null }));
  const dialog = byId("prompt");
  dialog.addEventListener("close", () => at.prompt !== undefined && go({ prompt: null, visit: null }));
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  byId("visits").addEventListener("click", (event) => {
    const button = event.target.closest("tbody tr")?.querySelector("button");
    if (button && event.target !== button) button.click();
  });
}
