"""Read rollouts that other programs logged: file formats, a common row type, and conversion."""
