"""`forge rehearse`: does a script end with the same bits when it is stopped and killed?"""
