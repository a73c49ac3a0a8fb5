"""Integrations with other training frameworks, one module for each; a module imports its framework."""
