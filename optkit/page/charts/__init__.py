"""Charts of a page, declared as data: what each shows, and nothing of how it is drawn."""
