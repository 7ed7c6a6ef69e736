// ---- one run: where its rollouts went, its posteriors, its facts

const PARTS = [
  { key: "mixed", name: "mixed", className: "mixed", meaning: "trained on, in a group with some rollouts right and some wrong." },
  { key: "given", name: "zero variance, given an advantage", className: "given", meaning: "trained on; all rewards of the group are the same, and the advantage comes from the posterior. Only held-out accuracy shows whether this helps." },
  { key: "no_advantage", name: "no advantage", className: "no-advantage", meaning: "trained on; all rewards of the group are the same, and its advantages are 0." },
  { key: "filtered", name: "filtered out", className: "filtered", meaning: "generated and not trained on: rejected by the method, or more than the batch holds." },
];
// At one rollout a prompt, the rewards of a group cannot differ.
const SINGLE_PARTS = PARTS.filter((part) => part.key !== "mixed").map((part) => part.key !== "given" ? part
  : { ...part, name: "with an advantage", meaning: "trained on; the advantage comes from the posterior." });
const sliced = (part, all) => all ? ` (${percent(part / all)})` : "";

function drawParts(host, parts, all) {
  const make = (part) => element("div", {}, swatch(part.className), element("dt"), element("dd", {}, part.meaning));
  keyed(host, parts, (part) => part.name, make, (node, part) => setText(node.children[1], `${part.name}: ${whole(part.count)}${sliced(part.count, all)}`));
}

VIEWS.usage = {
  ofOneRun: true,
  needs: () => [needSeries(theRun())].filter(Boolean),
  draw() {
    const answer = seriesOf(theRun());
    if (!answer) return 0;
    const { curves, totals, width } = answer, { step } = curves;
    const recorded = Boolean(totals) && step.length > 0;
    for (const id of ["usage-numbers", "usage-chart", "usage-parts"]) byId(id).hidden = !recorded;
    setText(byId("usage-note"), !step.length ? "No step was recorded yet." : !totals ? "This run did not record where its rollouts went."
      : (totals.single ? "One rollout a prompt: advantages come from the posterior, and zero variance is not defined."
        : "A group is mixed if some of its rollouts are right and some are wrong. The cost of a mixed group is "
        + "all generated rollouts (or tokens) divided by the number of mixed groups."));
    if (!recorded) return answer.last;
    drawNumbers(byId("usage-numbers"), [
      ["mixed groups", totals.single ? "-" : `${whole(totals.mixed_groups)} of ${whole(totals.groups)}`],
      ["zero-variance groups given an advantage",
        totals.single ? "-" : `${whole(totals.given_groups)} of ${whole(totals.zero_variance_groups)}`],
      ["rollouts per mixed group", decimal(totals.rollouts_per_mixed_group)],
      ["tokens per mixed group", whole(totals.tokens_per_mixed_group || null)],
      ["rollouts generated", whole(totals.generated)],
      ["trained on", whole(totals.trained) + sliced(totals.trained, totals.generated)],
      ["filtered out", whole(totals.filtered) + sliced(totals.filtered, totals.generated)],
      ["replayed", whole(totals.replayed)],
      ["prompts skipped", whole(totals.skipped)],
      ["tokens generated", short(totals.generated_tokens || null)],
      ...(totals.unused_rollouts ? [["unused at the end", whole(totals.unused_rollouts)]] : []),
    ]);
    const edges = [answer.first - 1, ...step], spans = step.map((last, i) => last - edges[i]), middles = step.map((last, i) => (last + edges[i] + 1) / 2);
    const counts = (totals.single ? SINGLE_PARTS : PARTS).map((part) => ({ ...part, count: totals.parts[part.key] }));
    drawParts(byId("usage-parts"), counts, totals.generated);
    const stepsOf = (x) => {
      const i = nearest(middles, x);
      return (spans[i] > 1 ? `${whole(edges[i] + 1)} to ` : "") + whole(step[i]);
    };
    const axis = { whole: true, xText: stepsOf, nameOf: (x) => `step${stepsOf(x).includes(" ") ? "s" : ""} ${stepsOf(x)}`,
      xLabel: width > 1 ? `step (each bar: mean of ${whole(width)} steps)` : "step" };
    const parts = counts.map((part) => ({ ...part, y: curves[part.key] }));
    chartOf(byId("usage-chart"), { height: 280 }).update({ ...axis, title: "Rollouts generated per step",
      bars: { x: middles, edges: edges.map((edge) => edge + 0.5), parts },
      legend: counts.map((part) => [() => swatch(part.className), part.name]), from: edges[0] + 0.5, to: step[step.length - 1] + 0.5 });
    return answer.last;
  },
};

// Explains the estimator's number for a prompt.
const MEANINGS = {
  "posterior mean": "Of each prompt the store keeps alpha and beta: the right and the wrong rollouts of all its visits, older ones"
    + " counting less. They are its posterior, Beta(alpha, beta), and alpha / (alpha + beta) is the expected share of right rollouts.",
  "group mean": "This estimator keeps no history: the group mean is the mean reward of the rollouts of one visit.",
  "estimated mean": "The estimated mean is the reward that the estimator expects of the prompt, from all its visits.",
};
const stateClass = (name) => name.replace(" ", "-");

VIEWS.posteriors = {
  ofOneRun: true,
  path: () => `runs/${theRun().id}/posteriors`,
  needs() { return [need(this.path(), theRun().version, theRun().step)].filter(Boolean); },
  draw() {
    const answer = got(this.path());
    if (!answer) return 0;
    const { epochs, thresholds } = answer, size = epochs.epoch.length, meanName = theRun().mean_name;
    setText(byId("posteriors-note"), !size ? "No prompt was visited yet."
      : `${MEANINGS[meanName]} Epoch 2 is every prompt's second visit of this run, and so on.`
      + " The view Prompts lists them by state, by mean and by change."
      + (answer.unit ? "" : " The states are meant for rewards in [0, 1]; this run has rewards outside that range."));
    byId("posteriors-body").hidden = !size;
    if (!size) return theRun().step ?? 0;
    const e = size - 1;
    const bins = epochs.histogram[e].length, edges = [...Array(bins + 1).keys()].map((i) => i / bins);
    byId("histogram").hidden = !answer.unit; // its bins are of [0, 1]
    const tallest = Math.max(1, ...epochs.histogram.flat());
    chartOf(byId("histogram")).update({ title: `Prompts by ${meanName} after epoch ${whole(epochs.epoch[e])}, ${plural(epochs.prompts[e], "prompt")}`,
      xLabel: meanName, high: tallest, yText: whole,
      xText: (x) => `${(x - 0.5 / bins).toFixed(2)} to ${(x + 0.5 / bins).toFixed(2)}`, from: 0, to: 1,
      bars: { x: edges.slice(0, -1).map((edge) => edge + 0.5 / bins), edges, parts: [{ name: "prompts", className: "bar", y: epochs.histogram[e] }] } });
    const overEpochs = { xLabel: "epoch", xText: whole, whole: true, nameOf: (x) => `epoch ${whole(x)}` };
    const measures = ["success rate", meanName];
    chartOf(byId("means")).update({ ...overEpochs, title: "Means over the prompts of each epoch", ...(answer.unit ? { low: 0, high: 1, ...percentAxis } : {}),
      lines: [epochs.success_rate, epochs.mean].map((y, i) => ({ name: measures[i], slot: i, x: epochs.epoch, y })),
      legend: measures.map((name, i) => [lineMark(i), name]) });
    const x = epochs.epoch, ends = [...x.map((epoch) => epoch - 0.5), x[size - 1] + 0.5];
    const share = (s) => epochs.states.map((counts, i) => epochs.prompts[i] ? counts[s] / epochs.prompts[i] : 0);
    const parts = STATE_NAMES.slice(0, 4).map((name, s) => ({ name, className: stateClass(name), y: share(s) }));
    chartOf(byId("state-shares")).update({ ...overEpochs, title: "Share of the prompts in each state", high: 1, ...percentAxis,
      bars: { x, edges: ends, parts }, from: ends[0], to: ends[size],
      legend: parts.map((part) => [() => swatch(part.className), part.name]) });
    const meanings = [`${meanName} of ${thresholds.mastered} or more after the last visit.`, "none of the others: solved sometimes.",
      `${meanName} at least ${thresholds.forgotten} below the highest it had after an earlier visit.`,
      `not one success so far, and a ${meanName} of ${thresholds.unsolved} or less.`,
      "known only from the warm start."];
    const now = STATE_NAMES.map((name, s) => ({ name, className: stateClass(name), count: answer.state_counts[s], meaning: meanings[s], s }));
    drawParts(byId("state-parts"), now.filter((part) => part.s < 4 || part.count), answer.state_counts.reduce((all, count) => all + count, 0));
    return answer.last;
  },
};

let toldAbout = null;

VIEWS.run = {
  ofOneRun: true,
  path: () => `runs/${theRun().id}/about`,
  needs() { return [need(this.path(), theRun().version)].filter(Boolean); },
  draw() {
    const told = got(this.path());
    if (!told || told === toldAbout) return theRun().step ?? 0;
    toldAbout = told;
    byId("facts").replaceChildren(...pairs(told.facts));
    byId("config").replaceChildren(...pairs(told.config));
    byId("events").replaceChildren(...told.events.map(([when, kind, from, to]) =>
      element("li", {}, `${when} ${kind.replaceAll("_", " ")}, ` + (from === to ? `at step ${whole(to)}` : `from step ${whole(from)} to ${whole(to)}`))));
    if (!told.events.length) byId("events").append(element("li", {}, "None."));
    return theRun().step ?? 0;
  },
};
