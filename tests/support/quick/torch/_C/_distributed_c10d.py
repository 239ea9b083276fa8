class TCPStore:
    def __init__(self, **_):
        """Takes a socket that listens: master_listen_fd."""
