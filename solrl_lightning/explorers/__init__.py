"""Exploration by actors of Ray, an optional dependency: imported with explorers=ray only."""
