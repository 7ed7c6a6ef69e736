// ---- responses: groups of rollouts, the right ones beside the wrong ones, and the kept rollouts of a step

const KINDS = {
  right: { mark: "\u2713", word: "right" },
  partly: { mark: "\u25d0", word: "partly right" },
  wrong: { mark: "\u2717", word: "wrong" },
  missing: { mark: "?", word: "missing" },
};
const GROUP_KINDS = {
  mixed: { word: "mixed", meaning: "its rewards differ" },
  right: { word: "all right", meaning: "all its rewards are equal, and right" },
  wrong: { word: "all wrong", meaning: "all its rewards are equal, and wrong" },
  alike: { word: "all alike", meaning: "all its rewards are equal, and partly right" },
  unverified: { word: "unverified", meaning: "none of its rollouts could be verified" },
  filtered: { word: "filtered out", meaning: "it was not trained on" },
  unknown: { word: "not known", meaning: "no verified rollout of it was kept" },
};
const MOST_GROUPS = 100; // drawn of one step
const MOST_BARS = 10; // of the histogram, unless there are few rewards
const FEW_REWARDS = 12;

// The score decides; without a score the reward does, which may hold penalties too.
function kindOf(rollout) {
  const value = rollout.score ?? rollout.reward;
  if (rollout.missing || !isNumber(value)) return "missing";
  return value >= 1 ? "right" : value > 0 ? "partly" : "wrong";
}
const isOf = (rollout, kind) => !kind || (kind === "truncated" ? Boolean(rollout.truncated) : kindOf(rollout) === kind);

// Returns the kind of a group of kept rollouts. group: the rewards seen of it, null if they are not known.
function groupKindOf(rollouts, group, form) {
  const verified = rollouts.filter((rollout) => kindOf(rollout) !== "missing" && isNumber(rollout.reward));
  if (!verified.length) return group?.rollouts ? "unknown" : "unverified";
  if (form !== null && verified.every((rollout) => isNumber(rollout.advantage) && !isNumber(rollout.baseline))) return "filtered";
  const [first] = verified, reward = first.reward;
  const others = isNumber(group?.successes) && Math.abs(group.rollouts * reward - group.successes) > 1e-4 * group.rollouts * Math.max(1, Math.abs(reward)); // rollouts that were not kept
  if (others || verified.some((rollout) => rollout.reward !== reward)) return "mixed";
  return kindOf(first) === "partly" ? "alike" : kindOf(first);
}

function tally(rollouts) {
  const counts = Object.keys(KINDS).map((kind) => [KINDS[kind].word, rollouts.filter((rollout) => kindOf(rollout) === kind).length]).filter(([, count]) => count);
  const cut = rollouts.filter((rollout) => rollout.truncated).length;
  return [...counts, ...(cut ? [["truncated", cut]] : [])].map(([word, count]) => `${whole(count)} ${word}`).join(", ");
}

const exact = or((value) => String(Number(value.toPrecision(6))));

// Returns how an advantage came about, as the command explain does.
function arithmetic({ reward, missing, advantage, baseline, scale, weight }, form) {
  if (missing || !isNumber(reward)) return "could not be verified";
  if (!isNumber(advantage)) return "advantage not known";
  if (!isNumber(baseline)) return form === null ? "the trainer's own advantage" : "not trained on";
  if (!scale) return "0, since the scale is 0";
  const factor = weight === 1 ? "" : `${exact(weight)} * `;
  return `${factor}(${exact(reward)} - ${exact(baseline)}) / ${exact(scale)} = ${exact(advantage)}`;
}

function card(rollout, form) {
  const kind = kindOf(rollout), { mark, word } = KINDS[kind];
  const numbers = [isNumber(rollout.reward) ? `reward ${decimal(rollout.reward)}` : "no reward"];
  if (isNumber(rollout.score) && rollout.score !== rollout.reward) numbers.push(`score ${decimal(rollout.score)}`);
  numbers.push(isNumber(rollout.advantage) ? `advantage ${signed(rollout.advantage)}` : "advantage not known");
  if (rollout.length) numbers.push(plural(rollout.length, "token"));
  if (isNumber(rollout.log_prob)) numbers.push(`log-prob ${decimal(rollout.log_prob)}`);
  if (rollout.lag) numbers.push(`lag ${decimal(rollout.lag)}`);
  const cut = rollout.cut_from ? `The first ${whole(rollout.text.length)} of ${whole(rollout.cut_from)} characters.` : "";
  return element("article", { class: `card ${kind}`, "data-kind": kind },
    element("p", { class: "verdict" }, element("strong", {}, element("span", { class: "mark", "aria-hidden": "true" }, mark), ` ${word}`),
      ...(rollout.truncated ? [" ", element("span", { class: "flag" }, "truncated")] : []),
      element("span", { class: "figures" }, ` ${numbers.join("\u00a0\u00b7 ")}`)),
    element("p", { class: "sum" }, `Advantage: ${arithmetic(rollout, form)}`),
    ...(rollout.read ? [element("p", { class: "sum read" }, "Verifier read: ", element("bdi", {}, rollout.read))] : []),
    textBox(rollout.text || "(no text)", `Rollout ${rollout.sample}, ${word}`),
    ...(cut ? [element("p", { class: "note" }, cut)] : []));
}

// Returns a group's rollouts in columns: the right ones beside the wrong ones.
function sides(rollouts, form) {
  const byKind = Map.groupBy(rollouts, kindOf);
  const kinds = Object.keys(KINDS).filter((kind) => byKind.has(kind));
  return element("div", { class: "sides" }, ...kinds.map((kind) => {
    const cards = byKind.get(kind).map((rollout) => card(rollout, form));
    return element("div", { class: `side wide-${Math.min(3, cards.length)}`, role: "group", "aria-label": `${cards.length} ${KINDS[kind].word}` }, ...cards);
  }));
}

// Returns what the store expected of a prompt before a step, and after it.
function expectation({ before, mean, low, high }) {
  const after = `${fixed(mean)} (90\u00a0%: ${fixed(low)} to ${fixed(high)})`;
  return `${theRun().mean_name} ${isNumber(before) ? `${fixed(before)} \u2192 ` : ""}${after}`;
}

const badge = (kind) => element("span", { class: `badge ${kind}`, title: GROUP_KINDS[kind].meaning }, GROUP_KINDS[kind].word);

// ---- which rollouts are shown

// Returns the bars of a histogram: {key, name, low, high, count}; a bar holds low <= reward < high, the last one also its high.
function rewardBars(rollouts) {
  const rewards = rollouts.filter((rollout) => kindOf(rollout) !== "missing" && isNumber(rollout.reward)).map((rollout) => rollout.reward).sort((a, b) => a - b);
  const values = [...new Set(rewards)], bars = [];
  if (values.length <= FEW_REWARDS) bars.push(...values.map((value) => ({ key: String(value), name: decimal(value), low: value, high: value })));
  else {
    const low = values[0], size = (values.at(-1) - low) / MOST_BARS;
    const edge = (bar) => bar === MOST_BARS ? values.at(-1) : Number((low + bar * size).toPrecision(6));
    for (let bar = 0; bar < MOST_BARS; bar++) {
      const [from, to] = [bar ? edge(bar) : low, edge(bar + 1)];
      bars.push({ key: `${from},${to}${bar === MOST_BARS - 1 ? "," : ""}`, name: `${decimal(from)}\nto ${decimal(to)}` });
    }
  }
  if (rewards.length < rollouts.length) bars.push({ key: "none", name: "none" });
  return bars.map((bar) => ({ ...bar, count: rollouts.filter((rollout) => hasReward(rollout, bar.key)).length }));
}

// key: "none", a reward, or the ends of a range, with a comma behind them if the upper end belongs to it.
function hasReward({ reward, missing }, key) {
  if (!key) return true;
  const known = !missing && isNumber(reward);
  if (key === "none" || !known) return key === "none" && !known;
  const [low, high = null, closed = null] = key.split(",");
  if (high === null) return reward === Number(low);
  return reward >= Number(low) && (closed === null ? reward < Number(high) : reward <= Number(high));
}

const FILTERS = ["reward", "group", "show"];
let walked = []; // ids of the groups that are shown, in their order

function drawHistogram(rollouts) {
  const bars = rewardBars(rollouts), most = Math.max(1, ...bars.map((bar) => bar.count));
  const make = () => element("button", { type: "button" },
    element("span", { class: "count" }),
    svg("svg", { viewBox: "0 0 10 100", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width: 10 })),
    element("span", { class: "name" }));
  setAttributes(byId("rewards"), { "data-chosen": at.reward ?? null });
  keyed(byId("rewards"), bars, (bar) => bar.key, make, (button, bar) => {
    const chosen = at.reward === bar.key, height = 100 * bar.count / most;
    button.onclick = () => go({ reward: at.reward === bar.key ? null : bar.key });
    setAttributes(button, { "aria-pressed": String(chosen), "aria-label": `Reward ${bar.name.replace("\n", " ")}: ${plural(bar.count, "rollout")}` });
    setText(button.firstChild, whole(bar.count));
    setAttributes(button.children[1].firstChild, { y: 100 - height, height });
    setText(button.lastChild, bar.name);
  });
}

// Returns the groups of a step: {id, prompt, rollouts, kind, hits}, where hits are the rollouts that pass the filters.
function groupsOf(answer) {
  return [...Map.groupBy(answer.rollouts, (rollout) => rollout.prompt_id)].map(([id, rollouts]) => {
    const prompt = answer.prompts[id] ?? { text: "", label: "" };
    const hits = rollouts.filter((rollout) => isOf(rollout, at.show) && hasReward(rollout, at.reward));
    return { id, prompt, rollouts, hits, kind: groupKindOf(rollouts, prompt.group, answer.form ?? null) };
  });
}

// Fills a field with a choice for each kind of group that the step has, and for the one that is chosen.
function drawGroupKinds(groups) {
  const kinds = Object.keys(GROUP_KINDS).filter((kind) => kind === at.group || groups.some((group) => group.kind === kind));
  keyed(byId("group"), ["", ...kinds], (kind) => kind, (kind) => element("option", { value: kind }), (option, kind) => {
    const count = groups.filter((group) => !kind || group.kind === kind).length;
    setText(option, `${kind ? GROUP_KINDS[kind].word : "all"} (${whole(count)})`);
  });
  setValue(byId("group"), at.group ?? "");
}

function drawGroup({ id, prompt, rollouts, hits, kind }, step, run, answer) {
  const unseen = (prompt.group?.rollouts ?? 0) - rollouts.length, isCut = answer.kept > answer.rollouts.length;
  return element("section", { class: "group", "data-group": kind },
    element("h2", {}, element("a", { href: addressWith({ prompt: id, visit: step, step }) }, `Prompt ${id}`), " ", badge(kind),
      element("span", { class: "note" }, ` ${tally(rollouts)}${unseen > 0 ? `; ${whole(unseen)} more not ${isCut ? "shown" : "kept"}` : ""}`)),
    element("p", { class: "text question", dir: "auto" }, brief(prompt.text, run)),
    element("p", { class: "note label" }, ...(prompt.label ? ["Label: ", element("bdi", {}, prompt.label.slice(0, 300)), " \u00b7 "] : []),
      ...(prompt.group ? [expectation(prompt.group)] : [])),
    sides(hits, answer.form ?? null));
}

// Says what became of the other rollouts of a step.
function othersOf({ kept, rollouts, generated, filtered, skipped }) {
  const notes = [];
  if (kept > rollouts.length) notes.push(`These are the first of ${whole(kept)} kept ones.`);
  if (generated > kept) notes.push(`${whole(generated)} were generated.`);
  if (filtered) notes.push(`${whole(filtered)} were filtered out.`);
  if (skipped) notes.push(`${plural(skipped, "prompt")} ${skipped === 1 ? "was" : "were"} skipped before generation.`);
  return notes.join(" ");
}

VIEWS.rollouts = {
  ofOneRun: true,
  // In a file, the nearest step whose rollouts lie in the file is shown.
  path() {
    const run = theRun(), there = source.steps(run.id), wanted = numberIn("step");
    const step = wanted === null ? there?.at(-1) ?? "latest" : there?.length ? there[nearest(there, wanted)] : wanted;
    return `runs/${run.id}/rollouts/${step}`;
  },
  // The rollouts of a step stay the same; the latest step changes, and one that is not written yet.
  needs() {
    const path = this.path(), changes = path.endsWith("latest") || numberIn("step") > theRun().step;
    const version = changes ? theRun().version : "kept";
    return theRun().keeps_rollouts ? [need(path, version)].filter(Boolean) : [];
  },
  draw() {
    const run = theRun(), entry = answers.get(this.path()), answer = entry?.answer;
    const found = answer?.rollouts ?? [], any = run.keeps_rollouts && Boolean(answer ?? (numberIn("step") !== null && entry));
    byId("rollout-tools").hidden = !any;
    byId("reward-box").hidden = !any || !found.length;
    if (!entry && run.keeps_rollouts) return 0;
    const step = answer?.step ?? numberIn("step");
    setText(byId("rollouts-note"), !run.keeps_rollouts ? "This run kept no responses." : entry.error ? entry.error
      : !found.length ? `No rollout of step ${whole(step)} was kept.`
      : `Step ${whole(step)}: ${plural(found.length, "kept rollout")}, ${tally(found)}. ${othersOf(answer)}`);
    const groups = answer ? groupsOf(answer) : [];
    const shown = groups.filter((group) => group.hits.length && (!at.group || group.kind === at.group));
    const drawn = shown.slice(0, MOST_GROUPS);
    walked = drawn.map((group) => group.id);
    if (any) {
      setValue(byId("step"), String(step));
      setValue(byId("kind"), at.show ?? "");
      drawGroupKinds(groups);
      drawHistogram(found);
      byId("earlier-step").disabled = stepBeside(step, -1) === null;
      byId("later-step").disabled = stepBeside(step, 1) === null;
    }
    byId("show-all").hidden = !FILTERS.some((name) => at[name]);
    const hits = shown.reduce((sum, group) => sum + group.hits.length, 0);
    const rest = shown.length > MOST_GROUPS ? `; the first ${MOST_GROUPS} groups are shown` : hits ? "" : "; Show all ends the filter";
    setText(byId("rollout-hits"), hits < found.length || rest
      ? `${whole(shown.length)} of ${plural(groups.length, "group")}, ${whole(hits)} of ${plural(found.length, "rollout")}${rest}` : "");
    drawOnce(byId("groups"), JSON.stringify([run.id, step, found.length, ...FILTERS.map((name) => at[name])]), () =>
      byId("groups").replaceChildren(...drawn.map((group) => drawGroup(group, step, run, answer))));
    return step ?? 0;
  },
};

// Returns the step before or after one, null if there is none.
function stepBeside(step, way) {
  const there = source.steps(theRun().id);
  if (there) return there[there.indexOf(step) + way] ?? null;
  const beside = step + way;
  return beside >= 1 && beside <= (theRun().step ?? 0) ? beside : null;
}

// ---- walking along the groups

const groupLinks = () => [...byId("groups").querySelectorAll("h2 a")];

// Moves the focus from one group of the list to another.
function walkList(way) {
  const links = groupLinks(), here = links.findIndex((link) => link.closest(".group").contains(document.activeElement));
  const next = links[here < 0 ? 0 : here + way];
  next?.focus();
  next?.closest(".group").scrollIntoView({ block: "nearest" });
}

// Returns the prompt of the group beside the open one in the list, null if there is none.
function groupBeside(way) {
  const here = at.view === "rollouts" ? walked.findIndex((id) => String(id) === at.prompt) : -1;
  return here < 0 ? null : walked[here + way] ?? null;
}
function walkOpen(way) {
  const prompt = groupBeside(way);
  if (prompt !== null) go({ prompt }, { replace: true });
}

const isWriting = (node) => node.matches("input, select, textarea");

function walkByKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || isWriting(event.target)) return;
  const inDialog = byId("prompt").open;
  if (event.key === "/" && !inDialog) document.querySelector("main > section:not([hidden]) form :is(input[type=search], #group)")?.focus();
  else if (at.view !== "rollouts" || event.target.closest("pre, svg, .wide")) return; // these scroll, or have a cursor of their own
  else if (inDialog && ["ArrowLeft", "ArrowRight"].includes(event.key)) walkOpen(event.key === "ArrowLeft" ? -1 : 1);
  else if (!inDialog && ["ArrowUp", "ArrowDown"].includes(event.key) && groupLinks().length) walkList(event.key === "ArrowUp" ? -1 : 1);
  else return;
  event.preventDefault();
}

function setUpRollouts() {
  const kinds = [["", "all"], ...Object.entries(KINDS).map(([kind, { word }]) => [kind, word]), ["truncated", "truncated"]];
  byId("kind").append(...kinds.map(([value, word]) => element("option", { value }, word)));
  byId("step").addEventListener("change", (event) => go({ step: event.target.value || null })); // without a number, the latest
  byId("kind").addEventListener("change", (event) => go({ show: event.target.value || null }));
  byId("group").addEventListener("change", (event) => go({ group: event.target.value || null }));
  byId("show-all").addEventListener("click", () => go({ reward: null, group: null, show: null }));
  for (const [id, way] of [["earlier-step", -1], ["later-step", 1]]) {
    byId(id).addEventListener("click", () => go({ step: stepBeside(Number(byId("step").value), way) }));
  }
  byId("earlier-group").addEventListener("click", () => walkOpen(-1));
  byId("later-group").addEventListener("click", () => walkOpen(1));
  byId("prompt").addEventListener("close", () => groupLinks()[walked.findIndex((id) => String(id) === PROMPT.shown)]?.focus());
  addEventListener("keydown", walkByKey);
}
