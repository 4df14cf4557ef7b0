"""Methods and recipes: pure functions from one configuration to another."""
