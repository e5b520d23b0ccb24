"""The output of a rank: captured, limited, logged and sent."""
