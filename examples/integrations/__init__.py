"""One adapter per RL framework: files to copy, see docs/integrations.md."""
