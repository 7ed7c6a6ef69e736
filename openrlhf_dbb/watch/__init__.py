"""Show runs in the browser: serve keeps a page up to date, and report writes the same page into one file.

serve    the command serve: listens, and who may ask
report   the command report; puts page.html, page.css and page.*.js together
api      maps a path such as runs/3/series to its answer, keeps answers, and lists the runs with their versions
queries  what each view of the page asks of a store, at once
curves   the curves of a run over its steps
history  the prompts of a run over their visits: mastered, forgotten, ...
"""
