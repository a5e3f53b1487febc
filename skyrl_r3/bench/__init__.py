"""``skyrl-r3 bench``: SkyRL's reply path with and without the overlay, side by side in one run.

``run`` starts a server and a client process for each SkyRL and for overlay off and on, and the processes (``server``,
``client``) run SkyRL's own handler and client on replies that are made up (``cases``). Nothing here imports SkyRL but
those two.
"""
