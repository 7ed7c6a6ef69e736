"""Runs watched: one page that a server keeps up to date (serve), or that lies in one file (report).

serve       serve: listens, prints the address
report      report: the same answers, in the file
server      the web application: routes, who may ask; the only module that needs starlette
poller      what keeps the answers up to date: one thread polls for all clients, one reads histories
cache       answers made once, however many ask
answers     what the page asks for, by path
runs        all runs in numbers, and what has changed
series      curves over the steps of a run
accuracy    held-out accuracy
probe_errors  squared error of the estimates against the probes
visits      prompts by visit and by state: what was mastered, what was forgotten
details     one prompt with its visits, the kept rollouts of a step
about       facts, configuration, lineage, events
numbers     numbers and JSON
page        one HTML page made of page.html, page.css and page.*.js
"""
