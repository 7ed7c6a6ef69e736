"""The study behind docs/evidence.md: does history make a better policy at equal rollouts?

    python -m study                 train a protocol's runs, measure, collect and draw (--protocol smoke: in minutes)
    python -m study.draw            redraw from the committed CSV files; needs no training stack

Train, through the real pipeline:
    protocols/       what is trained, one TOML file per protocol: cpu, paper, fewer, smoke, gpu
    protocol         reads a protocol into runs and their command lines
    tasks            the tasks: a seed's data and warm-started model
    run              trains what is not finished, in lanes side by side; lane() is the process of one lane
    session          trainings one after another in the same Ray actors
    shared_actors    these actors

Measure, at the policies of finished runs and without the pipeline:
    measure          what is still to be measured, in processes side by side
    tokens           prompts and answers as token ids, policies to measure
    policy_gradient  sampling, log-probabilities and gradients of a tiny policy
    exact            accuracy, without sampling where that is possible
    gradients        cosine of each estimator's update with a low-noise gradient
    rare             GRPO and history from starts of 0.3 to 60 % right responses
    control          the same training in plain PyTorch, also with prompts drawn by their exact probabilities

Simulate, where the truth is known (python -m study simulate):
    simulate            the command: tables and figures
    regimes             how success probabilities may change during training
    simulation          simulated trainings: estimators and discounts measured on the same draws
    simulation_in_time  trainings in which prompts come back at irregular gaps; forecasts measured too

The paper's claims:
    claims.toml      what the paper says, how it is tested, and how it is judged; data only
    claims           reads it
    findings         numbers with intervals, and verdicts by its rules
    paper_figures    their figure
    paper_page       their tables

Collect and show:
    collect          from the store, event files and measurements to CSV
    data             the rows of the CSV files, and the study made of them
    files            reads and writes these files
    analysis         paired differences, rollouts to a target, gradients, errors of estimates
    cells            table cells as text
    tables           the tables
    explanations     the tables of the control and of the masked token
    fewer            the test of fewer rollouts: arms, outcomes, tables, verdict
    verdict          the results in one line per comparison
    figures          the figures
    draw             tables and figures from the CSV files of results/
"""
