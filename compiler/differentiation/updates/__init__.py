"""From gradients to next values: accumulation, loss scaling, clipping, optimizers, schedules, averages."""
