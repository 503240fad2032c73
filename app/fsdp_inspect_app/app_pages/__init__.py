"""One page a question, each a script that Streamlit runs."""
