"""One running job over all its hosts: started, followed, cancelled, resumed, collected."""
