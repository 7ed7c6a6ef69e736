"""The commands: main has a table of all; train_grpo, tasks and import_log are here, the others in their own parts."""
