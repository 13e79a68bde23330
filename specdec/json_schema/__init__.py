"""JSON schemas of requests: checked, and written in the form that the grammar library follows."""
