"""Rollouts logged by other programs: file formats, a common row type, and conversion."""
