"""Which of the published methods suits a model? All of them applied in memory and asked the same."""
