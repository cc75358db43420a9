package main

// What a client keeps: section 10, "a device".

import (
	"encoding/json"
	"os"
	"path/filepath"
)

type posterior struct {
	Run   string
	Round int64
	Rows  [][]float64
}

// result is an answer that is on disk before it is announced. It stays until the next one.
type result struct {
	Run             string
	Round, Exchange int64
	Epoch           int64 // of the task
	Answer          answer
	Seconds         float64
	Block           int64
	Freed, Resent   bool
}

// isPast tells whether a task comes before this result in its run. A later epoch may ask for it again, as that of a restored backup.
func (r *result) isPast(task object) bool {
	round, exchange := task["round"].(int64), task["exchange"].(int64)
	earlier := round < r.Round || round == r.Round && exchange < r.Exchange
	return task["run"] == r.Run && earlier && task["epoch"].(int64) <= r.Epoch
}

// memory is all that survives a restart; one file, replaced as a whole.
type memory struct {
	Births    uint32
	Epoch     int64
	EpochKey  string // which signed its record
	Slots     map[string][]byte
	Posterior posterior
	Result    *result
	Residuals map[string]residual
	Prekeys   map[int64][]byte // unused
	Offered   int64            // the highest number that was offered
	Sums      map[string]*sumOf
	Trained   *trainedOnce // in this round and slot, for sums
	Choice    choice       // the last weights in the centers
}

func (c *client) load() {
	c.disk = memory{Slots: map[string][]byte{}, Residuals: map[string]residual{}, Prekeys: map[int64][]byte{}, Offered: -1, Sums: map[string]*sumOf{}}
	if text, err := os.ReadFile(filepath.Join(c.folder, "state.json")); err == nil {
		if err := json.Unmarshal(text, &c.disk); err != nil {
			panic(err)
		}
	}
}

// save is called with the lock held, before anything is sent that follows from what it stores.
func (c *client) save() {
	text, err := json.Marshal(&c.disk)
	if err != nil {
		panic(err)
	}
	path := filepath.Join(c.folder, "state.json")
	file, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = file.Write(text)
	}
	if err == nil {
		err = file.Sync()
	}
	file.Close()
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		panic(err)
	}
}
