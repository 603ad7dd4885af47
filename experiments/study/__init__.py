"""What all experiments share: prompts, runs, records, resampling, tables, plots."""
