"""From a sweep's overrides to running jobs: plan, freeze, start, watch over, collect."""
