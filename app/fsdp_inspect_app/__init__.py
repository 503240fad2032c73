"""The dashboard: Streamlit pages over recorded runs."""
