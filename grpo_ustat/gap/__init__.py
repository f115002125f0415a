"""The paper's results as studies: what is predicted, what is measured, whether they agree."""
