"""The process group on a rank: join, collectives, release."""
