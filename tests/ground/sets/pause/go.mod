module ground

go 1.26.0
