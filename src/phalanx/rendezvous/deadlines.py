"""How long a rank waits in the rendezvous before it tells or gives up something; the whole has a timeout of its own."""

CONNECT_S = 2.0
"""For one attempt to connect to the store."""
RIVAL_S = 5.0
"""For what listens on rank 0's port to answer."""
FOLDER_S = 3.0
"""For a folder on a network to show up."""
NOTE_S = 0.5
"""Before a rank notes that it waits for rank 0, and for the launcher to note an end."""
PART_S = 0.5
"""For the others to read why they can't meet, before rank 0 takes the store with it."""
