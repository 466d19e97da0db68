"""Finished runs side by side: scores, paired differences, costs and scores at equal budgets.

`compare` in `comparison` does the work; `page` writes it as HTML. Nothing is imported here.
"""
