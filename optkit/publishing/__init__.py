"""Hand an artifact over: its model card, and the places that it is pushed to."""
