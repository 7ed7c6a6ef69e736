"""The study behind docs/evidence.md: does history make a better policy at equal rollouts?

    python -m study            train a protocol's runs, measure, collect and draw (--protocol smoke: in minutes)
    python -m study claims     the paper's claims and verdicts; with names, train the runs that check them
    python -m study rare       GRPO and history from starts of 0.3 to 60 % right responses
    python -m study simulate   estimators where the truth is known
    python -m study draw       tables and figures from the committed CSV files

Train, through the real pipeline:
    protocols/       the experiments, one TOML file per protocol: real, tasks and estimates are of SmolLM2
    protocol         reads a protocol into runs and their command lines
    run              trains what is not finished, in lanes side by side; lane() is the process of one lane
    session          trainings one after another in the same Ray actors
    shared_actors    these actors

Measure, at the policies of finished runs and without the pipeline:
    measure          what is still to be measured, in processes side by side
    sampling         sampling and log-probabilities of a tiny policy
    exact            the task of a seed and a start, and the exact accuracy of a policy
    control          the same training in plain PyTorch, also with prompts drawn by their exact probabilities
    rare             trainings in plain PyTorch from rare successes

Simulate, where the truth is known:
    simulate         the command: tables and a figure
    regimes          how success probabilities may change during training
    simulation       simulated trainings, and what is measured in them

Collect and show:
    collect          from the store, event files and measurements to CSV
    rows             reads and writes the CSV files
    analysis         differences and intervals, rollouts to a target, errors of estimates
    cells            table cells as text
    tables           the tables
    fewer            the test of fewer rollouts
    claims           the paper's claims (claims.toml), tested and judged
    figures          the figures
"""
