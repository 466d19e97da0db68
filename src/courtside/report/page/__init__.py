"""The report page: one HTML file made from a run folder."""
