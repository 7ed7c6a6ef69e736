// ---- one run: where its rollouts went, its facts

const PARTS = [
  { key: "mixed", name: "mixed", className: "mixed", meaning: "trained on, in a group with some rollouts right and some wrong." },
  { key: "given", name: "zero variance, given an advantage", className: "given", meaning: "trained on; all rewards of the group are the same, and the advantage comes from the posterior. Only held-out accuracy shows whether this helps." },
  { key: "no_advantage", name: "no advantage", className: "no-advantage", meaning: "trained on; all rewards of the group are the same, and its advantages are 0." },
  { key: "filtered", name: "filtered out", className: "filtered", meaning: "generated and not trained on: rejected by the method, or more than the batch holds." },
];
// At one rollout a prompt, the rewards of a group cannot differ.
const SINGLE_PARTS = PARTS.filter((part) => part.key !== "mixed").map((part) => part.key !== "given" ? part
  : { ...part, name: "with an advantage", meaning: "trained on; the advantage comes from the posterior." });
const sliced = (part, all) => all && isNumber(part) ? ` (${percent(part / all)})` : "";

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
    byId("usage-numbers").hidden = !recorded;
    for (const id of ["usage-chart", "usage-parts"]) byId(id).hidden = !recorded || !totals.parts;
    setText(byId("usage-note"), !step.length ? "No step was recorded yet." : !totals ? "This run did not record where its rollouts went."
      : !totals.parts ? "This run's log does not tell the advantages, so it is not known what was trained on."
      : (totals.single ? "One rollout a prompt: advantages come from the posterior, and zero variance is not defined."
        : "A group is mixed if some of its rollouts are right and some are wrong. The cost of a mixed group is "
        + "all generated rollouts (or tokens) divided by the number of mixed groups."));
    if (!recorded) return answer.last;
    drawNumbers(byId("usage-numbers"), [
      ["mixed groups", totals.single ? "-" : `${whole(totals.mixed_groups)} of ${whole(totals.groups)}`],
      ["zero-variance groups given an advantage",
        totals.single || !totals.parts ? "-" : `${whole(totals.rescued * totals.groups / totals.generated)} of ${whole(totals.groups - totals.mixed_groups)}`],
      ["rollouts per mixed group", decimal(totals.rollouts_per_mixed_group)],
      ["tokens per mixed group", whole(totals.tokens_per_mixed_group || null)],
      ["rollouts generated", whole(totals.generated)],
      ["trained on", whole(totals.trained) + sliced(totals.trained, totals.generated)],
      ["filtered out", whole(totals.filtered) + sliced(totals.filtered, totals.generated)],
      ["prompts skipped", whole(totals.skipped)],
      ["tokens generated", short(totals.generated_tokens || null)],
      ...(totals.unused_rollouts ? [["unused at the end", whole(totals.unused_rollouts)]] : []),
    ]);
    if (!totals.parts) return answer.last;
    const counts = (totals.single ? SINGLE_PARTS : PARTS).map((part) => ({ ...part, count: totals.parts[part.key] }));
    drawParts(byId("usage-parts"), counts, totals.generated);
    const { middles, edges, axis } = stepBars(step, width), parts = counts.map((part) => ({ ...part, y: curves[part.key] }));
    chartOf(byId("usage-chart"), { height: 280 }).update({ ...axis, title: "Rollouts generated per step", bars: { x: middles, edges, parts },
      note: width > 1 ? "A bar is the mean of its steps." : "", legend: counts.map((part) => [() => swatch(part.className), part.name]) });
    return answer.last;
  },
};

VIEWS.run = {
  ofOneRun: true,
  path: () => `runs/${theRun().id}/about`,
  needs() { return [need(this.path(), theRun().version)].filter(Boolean); },
  draw() {
    const told = got(this.path());
    if (told) drawOnce(byId("facts"), told, () => {
      byId("facts").replaceChildren(...pairs(told.facts));
      byId("config").replaceChildren(...pairs(told.config));
      const events = told.events.map(([when, kind, from, to]) =>
        `${utc(when)} ${String(kind).replaceAll("_", " ")}, ` + (from === to ? `at step ${whole(to)}` : `from step ${whole(from)} to ${whole(to)}`));
      byId("events").replaceChildren(...(events.length ? events : ["None."]).map((event) => element("li", {}, event)));
    });
    return theRun().step ?? 0;
  },
};
