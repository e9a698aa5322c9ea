"""Which optimizer's steps count, which model it trains, and which others take part in its steps."""
