"""The documentation site: its build, its figures and the list of errors it must explain."""
