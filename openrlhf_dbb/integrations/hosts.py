"""The trainers that the posteriors serve: what each cannot do, and how its user writes a setting.

Refusals, and the table of features in docs/hosts.md, are made of these lists.
"""

from openrlhf_dbb.core.host import Capability, Host

_OF_STRATEGIES = "test_strategy_contract.py::test_the_command_line_chooses_it"
_OF_EXPERIENCES = (
    "test_experience_maker.py::test_every_estimator_and_form_gives_what_it_gives_in_ones_own_loop"
)
OPENRLHF = Host(
    name="OpenRLHF",
    lacks={},
    tested={
        "every estimator": _OF_EXPERIENCES,
        "every advantage form": _OF_EXPERIENCES,
        "strategy posterior": _OF_STRATEGIES,
        "strategy dynamic": _OF_STRATEGIES,
        "strategy greso": _OF_STRATEGIES,
        "strategy two_stage": _OF_STRATEGIES,
        "strategy allocate": "test_experience_maker.py::test_groups_of_unequal_size_count_alike",
        "strategy shares": "test_dry_run.py::test_shares_of_sources_are_checked_with_the_data",
        "replay (RePO)": "test_experience_maker.py::test_rollouts_are_replayed_from_the_third_visit_on",
        "training without generating": "test_recorded.py::"
        "test_a_run_without_vllm_trains_on_recorded_rollouts_to_the_same_weights",
        "thinning": "test_experience_maker.py::test_a_thinned_step_trains_on_fewer_rollouts_and_stores_all_advantages",
        "probes": "test_training.py::test_the_chosen_prompts_are_probed_at_every_visit_and_probes_train_nothing",
        "warm start": "test_training.py::"
        "test_a_warm_start_begins_with_the_other_runs_posteriors_and_missing_rewards_are_no_failures",
        "known pass rates": "test_data.py::test_pass_rates_are_successes_and_attempts",
        "groups by source": "test_data.py::test_the_columns_of_rates_and_groups_have_to_be_there_and_may_be_one",
        "exact resume": "test_resume.py::test_two_ranks_resume_with_every_zero_stage",
        "held-out evaluation": "test_evaluation_training.py::test_samples_are_sorted_by_data_source",
        "what the verifier read": "test_experience_maker.py::test_what_the_model_wrote_is_kept_trained_on_or_not",
        "explain": "test_experience_maker.py::test_explain_and_the_page_show_a_step",
        "page": "test_experience_maker.py::test_explain_and_the_page_show_a_step",
    },
)

_TRL_STRATEGIES = "test_trl_strategies.py"
TRL = Host(
    name="TRL",
    lacks={Capability.RECORD: "its integration records no rollouts yet"},
    tested={
        "every estimator": "test_trl_features.py::test_every_estimator_gives_what_it_gives_in_ones_own_loop",
        "every advantage form": "test_trl.py::test_every_form_gives_what_it_gives_in_ones_own_loop",
        "strategy posterior": "test_trl.py::test_a_resume_in_a_later_pass_is_as_the_unbroken_run_bit_for_bit",
        "strategy dynamic": f"{_TRL_STRATEGIES}::test_only_groups_of_mixed_rewards_are_trained_on",
        "strategy greso": f"{_TRL_STRATEGIES}::test_only_groups_of_mixed_rewards_are_trained_on",
        "strategy two_stage": (
            f"{_TRL_STRATEGIES}::test_two_stages_generate_two_of_each_prompt_and_the_other_two_where_they_differ"
        ),
        "strategy allocate": f"{_TRL_STRATEGIES}::"
        "test_groups_of_unequal_size_are_trained_on_with_their_weights",
        "strategy shares": "test_trl_features.py::test_sources_have_their_shares_of_each_batch",
        "replay (RePO)": f"{_TRL_STRATEGIES}::test_a_resume_replays_the_same_rows_bit_for_bit",
        "thinning": "test_trl_features.py::test_thinned_advantages_are_trained_on_and_those_of_the_form_are_stored",
        "probes": "test_trl_features.py::test_chosen_prompts_are_probed_and_probes_train_nothing",
        "warm start": "test_trl.py::test_remember_changes_the_store_alone",
        "known pass rates": "test_trl_features.py::test_known_pass_rates_and_sources_are_columns_of_the_data_set",
        "groups by source": "test_trl_features.py::test_known_pass_rates_and_sources_are_columns_of_the_data_set",
        "exact resume": "test_trl.py::test_a_resume_in_a_later_pass_is_as_the_unbroken_run_bit_for_bit",
        "held-out evaluation": "test_trl.py::test_an_evaluation_changes_no_posterior_and_is_stored",
        "what the verifier read": "test_trl_features.py::test_what_a_reward_function_logs_as_read_is_stored",
        "explain": "test_trl_features.py::test_explain_and_the_page_show_a_step",
        "page": "test_trl_features.py::test_explain_and_the_page_show_a_step",
    },
)

_OF_VERL = "test_verl.py::test_every_estimator_and_form_gives_what_it_gives_in_ones_own_loop"
VERL = Host(
    name="verl",
    lacks={
        Capability.RECORD: "its own SkipManager does that, with dumps of its own",
        Capability.EXTRA_ROWS: "its _compute_old_log_prob replaces the log-probs of every row of a batch",
    },
    tested={
        "every estimator": _OF_VERL,
        "every advantage form": _OF_VERL,
        "strategy posterior": "test_verl.py::test_the_strategy_draws_what_verl_generates_for",
        "strategy dynamic": "test_verl.py::test_a_strategy_fills_the_batches",
        "strategy greso": "test_verl.py::test_a_strategy_fills_the_batches",
        "strategy two_stage": "test_verl.py::test_a_strategy_fills_the_batches",
        "strategy allocate": "test_verl.py::test_weights_of_filled_batches_are_of_their_prompts",
        "strategy shares": "test_verl.py::test_sources_have_their_shares_of_each_batch",
        "thinning": "test_verl.py::test_thinned_advantages_are_trained_on_and_those_of_the_form_are_stored",
        "probes": "test_verl.py::test_chosen_prompts_are_probed_and_probes_train_nothing",
        "warm start": "test_verl.py::test_a_warm_start_begins_with_another_run_s_posteriors",
        "known pass rates": "test_verl.py::test_known_pass_rates_of_a_column_are_what_the_posteriors_begin_with",
        "groups by source": "test_verl.py::test_metrics_are_by_source_also_after_a_resume",
        "exact resume": "test_verl.py::test_a_resume_goes_back_to_the_checkpoints_step",
        "what the verifier read": "test_verl.py::test_what_the_verifier_read_is_stored",
        "held-out evaluation": "test_verl.py::test_a_validation_is_stored_by_prompt",
        "explain": "test_verl.py::test_explain_and_the_page_show_a_step",
        "page": "test_verl.py::test_explain_and_the_page_show_a_step",
    },
)

_OF_LOOP = "test_loop.py::test_every_strategy_stores_each_rollout_and_goes_on_from_a_checkpoint"
_OF_EACH = "test_loop.py::test_every_estimator_and_form_gives_what_posteriors_give"
OWN_LOOP = Host(
    name="a loop of one's own",
    lacks={},
    tested={
        "every estimator": _OF_EACH,
        "every advantage form": _OF_EACH,
        "strategy posterior": _OF_LOOP,
        "strategy dynamic": _OF_LOOP,
        "strategy greso": _OF_LOOP,
        "strategy two_stage": _OF_LOOP,
        "strategy allocate": _OF_LOOP,
        "strategy shares": "test_strategy_shares.py::"
        "test_a_loop_draws_by_the_sources_of_its_posteriors_and_counts_them",
        "replay (RePO)": "test_loop.py::test_replayed_rows_come_back_with_a_resume",
        "training without generating": "test_loop.py::"
        "test_recorded_batches_are_trained_on_in_their_order_and_nothing_is_generated",
        "thinning": "test_loop.py::test_thinned_advantages_are_trained_on_and_those_of_the_form_are_stored",
        "probes": "test_loop.py::test_chosen_prompts_are_probed_at_every_visit",
        "warm start": "test_posteriors.py::test_a_warm_start_begins_with_another_runs_posteriors",
        "known pass rates": "test_posteriors.py::test_known_pass_rates_are_a_visit_before_the_first_step",
        "groups by source": "test_posteriors.py::test_metrics_by_source_and_of_the_hardest",
        "exact resume": _OF_LOOP,
        "held-out evaluation": "test_loop.py::test_held_out_samples_are_stored_by_prompt",
        "what the verifier read": "test_loop.py::test_what_the_verifier_read_is_stored",
        "explain": "test_loop.py::test_explain_and_the_page_show_a_loop_s_step",
        "page": "test_loop.py::test_explain_and_the_page_show_a_loop_s_step",
    },
)

HOSTS = (OPENRLHF, TRL, VERL, OWN_LOOP)

OPENRLHF_NAMES = {
    "estimator": "--estimator {}",
    "memory": "--point.memory {}",
    "form": "--algo.advantage.estimator {}",
    "strategy": "--rollout.strategy {}",
    "group": "--rollout.n_samples_per_prompt {}",
    "thin": "--train.thin {}",
    "probe_fraction": "--probe.fraction {}",
    "replay": "--replay.samples {}",
}
_MEMORY = "parameters={{'memory': {!r}}}"
TRL_NAMES = {
    "group": "num_generations={}",
    "memory": _MEMORY,
    "replay": "replay={{'samples': {}}}",
}
VERL_NAMES = {
    "estimator": "algorithm.posterior.estimator={}",
    "memory": "algorithm.posterior.parameters.memory={}",
    "form": "algorithm.posterior.form={}",
    "strategy": "algorithm.posterior.strategy={}",
    "group": "actor_rollout_ref.rollout.n={}",
    "thin": "algorithm.posterior.thin={}",
    "probe_fraction": "algorithm.posterior.probe_fraction={}",
}
