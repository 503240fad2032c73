"""The pages of the dashboard, one script per page, which Streamlit runs."""
