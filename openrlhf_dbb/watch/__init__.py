"""Show runs in the browser: serve keeps a page up to date, and report writes the same page into one file.

serve     the command serve: listens, and prints the address
server    the web application: its routes, and who may ask; the only module that needs starlette
report    the command report: puts the same answers into a file
api       maps a path such as runs/3/series to its answer, keeps answers, and lists the runs with their versions
series    the curves of a run over its steps
visits    the prompts of a run over their visits: mastered, forgotten, ...; the picture of all of them
details   one prompt with its visits, the kept rollouts of a step, facts about a run
page      puts page.html, page.css and page.*.js together, and numbers into JSON
"""
