"""The trainers that the posteriors serve: what each cannot do, and how its user writes a setting.

Refusals, and the table of features in the documentation, are made of these lists.
"""

from openrlhf_dbb.core.host import Capability, Host

OPENRLHF = Host(
    name="OpenRLHF",
    lacks={},
    tested={
        "every estimator": "test_experience_maker.py::test_dbb_estimates_correctness_not_the_penalised_reward",
        "strategy posterior": "test_strategy_contract.py::test_the_command_line_chooses_it",
        "strategy dynamic": "test_strategy_contract.py::test_the_command_line_chooses_it",
        "strategy greso": "test_strategy_contract.py::test_the_command_line_chooses_it",
        "thinning": "test_experience_maker.py::test_a_thinned_step_trains_on_fewer_rollouts_and_stores_all_advantages",
        "probes": "test_training.py::test_the_chosen_prompts_are_probed_at_every_visit_and_probes_train_nothing",
        "exact resume": "test_resume.py::test_two_ranks_resume_with_every_zero_stage",
        "held-out evaluation": "test_evaluation_training.py::test_samples_are_sorted_by_data_source",
        "what the verifier read": "test_experience_maker.py::test_what_the_model_wrote_is_kept_trained_on_or_not",
    },
)

TRL = Host(
    name="TRL",
    lacks={
        Capability.PROBE: "it trains on every rollout of a batch",
        Capability.THIN: "it trains on the advantages that are stored",
        Capability.PASS_RATES: "its data set is read for prompts and labels alone",
        Capability.SOURCES: "its data set is read for prompts and labels alone",
        Capability.READ: "a reward function of it returns numbers alone",
    },
    tested={
        "every advantage form": "test_trl.py::test_every_form_gives_what_it_gives_in_ones_own_loop",
        "strategy posterior": "test_trl.py::test_a_resume_in_a_later_pass_is_as_the_unbroken_run_bit_for_bit",
        "exact resume": "test_trl.py::test_a_resume_in_a_later_pass_is_as_the_unbroken_run_bit_for_bit",
        "held-out evaluation": "test_trl.py::test_an_evaluation_changes_no_posterior_and_is_stored",
    },
)

VERL = Host(
    name="verl",
    lacks={
        Capability.GENERATE_MORE: "it generates batches of a fixed size, apart from its own algorithm.filter_groups",
        Capability.EXTRA_ROWS: "its step trains on the rollouts that it has generated",
        Capability.PROBE: "it trains on every rollout of a batch",
        Capability.THIN: "it trains on the advantages that are stored",
        Capability.PASS_RATES: "its data set is read for prompts and labels alone",
        Capability.SOURCES: "its data set is read for prompts and labels alone",
        Capability.HELD_OUT: "its validation reports means over the data set",
        Capability.READ: "its reward function returns numbers alone",
    },
    tested={
        "every estimator": "test_verl.py::test_dbb_by_hand_and_each_group_once",
        "strategy posterior": "test_verl.py::test_the_strategy_draws_what_verl_generates_for",
        "exact resume": "test_verl.py::test_a_resume_goes_back_to_the_checkpoints_step",
    },
)

OWN_LOOP = Host(
    name="a loop of one's own",
    lacks={},
    tested={
        "warm start": "test_posteriors.py::test_a_warm_start_begins_with_another_runs_posteriors",
        "known pass rates": "test_posteriors.py::test_known_pass_rates_are_a_visit_before_the_first_step",
        "groups by source": "test_posteriors.py::test_metrics_by_source_and_of_the_hardest",
        "exact resume": "test_posteriors.py::test_a_run_taken_back_goes_on_as_one_that_is_not_to_the_last_bit",
    },
)

OPENRLHF_NAMES = {
    "estimator": "--estimator {}",
    "memory": "--point.memory {}",
    "form": "--algo.advantage.estimator {}",
    "strategy": "--rollout.strategy {}",
    "group": "--rollout.n_samples_per_prompt {}",
}
_MEMORY = "parameters={{'memory': {!r}}}"
TRL_NAMES = {"group": "num_generations={}", "memory": _MEMORY}
VERL_NAMES = {
    "estimator": "algorithm.posterior.estimator={}",
    "memory": "algorithm.posterior.parameters.memory={}",
    "form": "algorithm.posterior.form={}",
    "strategy": "algorithm.posterior.strategy={}",
    "group": "actor_rollout_ref.rollout.n={}",
}
