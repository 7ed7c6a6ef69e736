// ---- responses: cards of rollouts, and the kept rollouts of a step

const KINDS = {
  right: { mark: "\u2713", word: "right" },
  partly: { mark: "\u25d0", word: "partly right" },
  wrong: { mark: "\u2717", word: "wrong" },
  missing: { mark: "?", word: "missing" },
};
const MOST_GROUPS = 100; // drawn of one step

// The score decides; without a score the reward does, which may hold penalties too.
function kindOf(rollout) {
  const value = rollout.score ?? rollout.reward;
  if (rollout.missing || !isNumber(value)) return "missing";
  return value >= 1 ? "right" : value > 0 ? "partly" : "wrong";
}
const isOf = (rollout, kind) => !kind || (kind === "truncated" ? Boolean(rollout.truncated) : kindOf(rollout) === kind);

function tally(rollouts) {
  const counts = Object.keys(KINDS).map((kind) => [KINDS[kind].word, rollouts.filter((rollout) => kindOf(rollout) === kind).length]).filter(([, count]) => count);
  const cut = rollouts.filter((rollout) => rollout.truncated).length;
  return [...counts, ...(cut ? [["truncated", cut]] : [])].map(([word, count]) => `${whole(count)} ${word}`).join(", ");
}

function card(rollout) {
  const kind = kindOf(rollout), { mark, word } = KINDS[kind];
  const numbers = [isNumber(rollout.reward) ? `reward ${decimal(rollout.reward)}` : "no reward"];
  if (isNumber(rollout.score) && rollout.score !== rollout.reward) numbers.push(`score ${decimal(rollout.score)}`);
  numbers.push(isNumber(rollout.advantage) ? `advantage ${signed(rollout.advantage)}` : "advantage not known");
  if (rollout.length) numbers.push(plural(rollout.length, "token"));
  if (isNumber(rollout.log_prob)) numbers.push(`log-prob ${decimal(rollout.log_prob)}`);
  if (rollout.lag) numbers.push(`lag ${decimal(rollout.lag)}`);
  return element("article", { class: `card ${kind}`, "data-kind": kind },
    element("p", { class: "verdict" }, element("strong", {}, element("span", { class: "mark", "aria-hidden": "true" }, mark), ` ${word}`),
      ...(rollout.truncated ? [" ", element("span", { class: "flag" }, "truncated")] : []),
      element("span", { class: "figures" }, ` ${numbers.join(" \u00b7 ")}`)),
    textBox(rollout.text || "(no text)", `Rollout ${rollout.sample}, ${word}`),
    ...(rollout.read ? [element("p", { class: "note" }, "Verifier read: ", element("bdi", {}, rollout.read))] : []));
}

VIEWS.rollouts = {
  ofOneRun: true,
  // In a file, the nearest step whose rollouts lie in the file is shown.
  path() {
    const run = theRun(), there = source.steps(run.id), wanted = numberIn("step");
    const step = wanted === null ? there?.at(-1) ?? "latest" : there?.length ? there[nearest(there, wanted)] : wanted;
    return `runs/${run.id}/rollouts/${step}`;
  },
  // The rollouts of a step stay the same; the latest step changes.
  needs() {
    const path = this.path(), version = path.endsWith("latest") ? theRun().version : "kept";
    return theRun().keeps_rollouts ? [need(path, version)].filter(Boolean) : [];
  },
  draw() {
    const run = theRun(), entry = answers.get(this.path()), answer = entry?.answer;
    const found = answer?.rollouts ?? [], any = run.keeps_rollouts && Boolean(answer ?? (numberIn("step") !== null && entry));
    byId("rollout-tools").hidden = !any;
    if (!entry && run.keeps_rollouts) return 0;
    const step = answer?.step ?? numberIn("step");
    setText(byId("rollouts-note"), !run.keeps_rollouts ? "This run kept no responses." : entry.error ? entry.error
      : !found.length ? `No rollout of step ${whole(step)} was kept.`
      : `Step ${whole(step)}: ${plural(found.length, "kept rollout")}, ${tally(found)}.`);
    if (any) {
      setValue(byId("step"), String(step));
      setValue(byId("kind"), at.show ?? "");
    }
    const prompts = answer?.prompts ?? {}, hits = found.filter((rollout) => isOf(rollout, at.show));
    setText(byId("rollout-hits"), hits.length < found.length ? `${whole(hits.length)} of ${plural(found.length, "rollout")}` : "");
    const groups = [...Map.groupBy(hits, (rollout) => rollout.prompt_id)].slice(0, MOST_GROUPS);
    drawOnce(byId("groups"), JSON.stringify([run.id, step, found.length, at.show]), () => byId("groups").replaceChildren(...groups.map(([id, rollouts]) => {
      const prompt = prompts[id] ?? { text: "", label: "" };
      return element("section", { class: "group" },
        element("h2", {}, element("a", { href: addressWith({ prompt: id, visit: step }) }, `Prompt ${id}`), element("span", { class: "note" }, ` ${tally(rollouts)}`)),
        element("p", { class: "text question", dir: "auto" }, brief(prompt.text, run)),
        ...(prompt.label ? [element("p", { class: "note label" }, "Label: ", element("bdi", {}, prompt.label.slice(0, 300)))] : []),
        element("div", { class: "cards" }, ...rollouts.map(card)));
    })));
    return step ?? 0;
  },
};

function setUpRollouts() {
  const kinds = [["", "all"], ...Object.entries(KINDS).map(([kind, { word }]) => [kind, word]), ["truncated", "truncated"]];
  byId("kind").append(...kinds.map(([value, word]) => element("option", { value }, word)));
  byId("step").addEventListener("change", (event) => go({ step: event.target.value || null })); // without a number, the latest
  byId("kind").addEventListener("change", (event) => go({ show: event.target.value || null }));
}
