"""The state of this rank's variables: recorded after good cells, compared between ranks, copied to other ranks."""
