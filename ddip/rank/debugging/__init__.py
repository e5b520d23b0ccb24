"""The debugger of a rank, and the questions that code on a rank asks the user."""
