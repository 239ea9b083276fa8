"""The ranks as one group: who this one is, how they meet, agree and part, and the device that each has."""
