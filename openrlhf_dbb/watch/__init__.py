"""Show runs in the browser: serve keeps one page up to date, report writes the same page into one file.

serve       the command serve: listens, prints the address
report      the command report: collects the same answers into a file
server      the web application: its routes, and who may ask; the only module that needs starlette
answers     maps a path such as runs/3/series to its answer
cache       keeps answers, and makes each of them once however many clients ask
runs        the list of runs, with a version that changes when a run does
series      the curves of a run over its steps
visits      the prompts of a run over their visits: mastered, forgotten, ...
details     one prompt with its visits, and the kept rollouts of a step
about       facts, configuration, lineage and events of a run
numbers     numbers as JSON holds them
page        puts page.html, page.css and page.*.js together
"""
