"""The tools of the toolbox, and what each may be called."""
